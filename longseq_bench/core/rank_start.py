"""The parts of a rank's phase `start`, in order.

A launcher of many hosts reads them: only ranks that try to connect can fail to meet. The first use
of a GPU, or a compiler, may take minutes before or after that.
"""

OPENING = "opening the device"
CONNECTING = "connecting to the other ranks"
WARMING_UP = "warming up"
