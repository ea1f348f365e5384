"""Record the first command: `python docs/first_answer.py` writes docs/images/first-answer.svg.

It runs `longseq maxlen --impl ring` in an empty folder, 80 columns wide, and draws what is printed.
Each line appears when it was printed, a fifth of the time after the start; a reader who wants no
movement sees all lines at once. Run it on an idle machine.
"""

import os
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

COMMAND = ["maxlen", "--impl", "ring"]
FILE = Path(__file__).parent / "images" / "first-answer.svg"
COLUMNS, LINE, CHARACTER, SPEED = 80, 19, 7.83, 5
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #d6deeb; white-space: pre; }
.typed { fill: #7fdbca; }
.line { animation: appear .01s both; }
@keyframes appear { from { opacity: 0; } }
@media (prefers-reduced-motion: reduce) { .line { animation: none; } }
"""


def main() -> None:
    """Run the command, and write the picture."""
    lines, seconds = record()
    FILE.write_text(draw(lines), encoding="utf-8")
    print(f"{FILE.name}: {len(lines)} lines, {seconds:.1f} s, {FILE.stat().st_size / 1000:.0f} kB")


def record() -> tuple[list[tuple[float, str]], float]:
    """Return the printed lines with the seconds at which they came, and the time of all."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "longseq_bench", *COMMAND]
    start = time.monotonic()
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed = process.stdout or ()
        lines.extend((time.monotonic() - start, line.rstrip()) for line in printed)
    if process.wait():
        sys.exit(f"the command ended with {process.returncode}: {lines[-1][1]}")
    return lines, time.monotonic() - start


def draw(lines: list[tuple[float, str]]) -> str:
    """Return the picture of the lines below the typed command."""
    rows = [f'<text class="typed" x="14" y="28">$ longseq {" ".join(COMMAND)}</text>']
    for i, (seconds, line) in enumerate(lines, 1):
        delay = f'style="animation-delay: {seconds / SPEED:.2f}s"'
        rows.append(f'<text class="line" {delay} x="14" y="{28 + i * LINE}">{escape(line)}</text>')
    width, height = round(28 + COLUMNS * CHARACTER), 28 + (len(lines) + 1) * LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    label = f"<title>longseq {' '.join(COMMAND)}: the output of the first command</title>"
    frame = f'<rect width="{width}" height="{height}" rx="8" fill="#011627"/>'
    return "\n".join([head, label, f"<style>{STYLE}</style>", frame, *rows, "</svg>", ""])


if __name__ == "__main__":
    main()
