"""Make the pictures of first screens: `python docs/screens.py` writes docs/images/KIND.png.

Each is the top of the HTML page of a kind that a document shows, on a folder of results/xeon2, in
headless Chromium at 1280 px, light. Needs chromium, chromedriver and selenium, which
`pip install -e ".[test]"` installs.
"""

import base64
import shutil
import struct
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from longseq_bench.reports.kinds import documents
from longseq_bench.reports.render.html import page
from longseq_bench.store import load

ROOT = Path(__file__).parents[1]
SCREENS = {"extreme": "extreme", "implementations": "quickstart"}
"""The folder of results/xeon2 whose report of each kind is shown."""
WIDTH, MAX_HEIGHT, MAX_BYTES = 1280, 1400, 120_000
DRAWN = "return !document.querySelector('section figure') || !!document.querySelector('svg.marks')"
BOTTOM = "return document.querySelector('section').getBoundingClientRect().bottom"
PIXELS = """
const [source, done] = arguments, image = new Image();
image.onload = () => {
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height), reader = new FileReader();
  reader.onload = () => done([image.height, image.width, reader.result.split(",")[1]]);
  reader.readAsDataURL(new Blob([data]));
};
image.src = `data:image/png;base64,${source}`;
"""
"""Script that decodes a PNG: height, width, and RGBA bytes in base64."""


def main() -> None:
    """Write a picture per kind, and end with 1 if one is larger than MAX_BYTES."""
    out = ROOT / "docs" / "images"
    out.mkdir(exist_ok=True)
    browser, too_large = open_browser(), []
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in SCREENS.items():
            file = Path(folder) / f"{kind}.html"
            (document,) = documents(load(ROOT / "results" / "xeon2" / name).records, [kind])
            file.write_text(page(document), encoding="utf-8")
            picture = take(browser, file)
            (out / f"{kind}.png").write_bytes(picture)
            print(f"docs/images/{kind}.png  {len(picture) / 1000:.0f} kB  results/xeon2/{name}")
            too_large += [kind] if len(picture) > MAX_BYTES else []
    browser.quit()
    sys.exit(f"larger than {MAX_BYTES:,} bytes: {', '.join(too_large)}" if too_large else 0)


def open_browser() -> Any:
    """Return a headless Chromium, as wide as the pictures."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        sys.exit("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=Service(driver))
    size = {"width": WIDTH, "height": MAX_HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    return browser


def take(browser: Any, file: Path) -> bytes:
    """Return the top of a page as PNG: down to the end of its first section, if that is near."""
    browser.get(file.as_uri())
    deadline = time.monotonic() + 20
    while not browser.execute_script(DRAWN) and time.monotonic() < deadline:
        time.sleep(0.05)
    height = min(browser.execute_script(BOTTOM) + 12, MAX_HEIGHT)
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    browser.get("about:blank")
    rows, columns, data = browser.execute_async_script(PIXELS, shot["data"])
    pixels = np.frombuffer(base64.b64decode(data), np.uint8).reshape(rows, columns, 4)
    return encode(pixels[:, :, :3])


def encode(pixels: Any) -> bytes:
    """Return pixels (rows, columns, RGB) as PNG with the 256 most frequent colours."""
    rows, columns, _ = pixels.shape
    flat = pixels.reshape(-1, 3).astype(np.int32) @ [65536, 256, 1]
    colours, where, counts = np.unique(flat, return_inverse=True, return_counts=True)
    split = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    palette = split[np.argsort(-counts, kind="stable")[:256]]
    nearest = ((split[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    lines = np.zeros((rows, columns + 1), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = nearest[where].reshape(rows, columns)
    header = struct.pack(">2I5B", columns, rows, 8, 3, 0, 0, 0)
    parts = (b"IHDR", header), (b"PLTE", palette.astype(np.uint8).tobytes())
    found = [*parts, (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in found
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


if __name__ == "__main__":
    main()
