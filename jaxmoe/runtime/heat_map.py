"""Pictures of expert load without a plotting library: an array of pixels, and its PNG."""

import struct
import zlib

import numpy as np

#: Load / mean at the ends and the middle of the scale: starved blue, balanced near white, overloaded red.
LOAD_SCALE = ((0.0, (33, 78, 140)), (1.0, (247, 247, 247)), (2.0, (214, 96, 77)), (4.0, (90, 0, 20)))
_CELL_PIXELS = 8


def load_image(load_LE: np.ndarray) -> np.ndarray:
    """Load / mean per layer (down) and expert (across) as uint8 pixels [height, width, 3]."""
    stops = [stop for stop, _ in LOAD_SCALE]
    channels = [np.interp(load_LE, stops, [colour[c] for _, colour in LOAD_SCALE]) for c in range(3)]
    pixels = np.rint(np.stack(channels, axis=-1)).astype(np.uint8)
    return pixels.repeat(_CELL_PIXELS, axis=0).repeat(_CELL_PIXELS, axis=1)


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8 pixels [height, width, 3] as a PNG file."""
    assert (pixels.dtype, pixels.ndim, pixels.shape[-1]) == (np.uint8, 3, 3), (pixels.dtype, pixels.shape)
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # filter 0 per line

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
