"""Unpacking compressed bodies, no further than to a bound.

A few kilobytes may unpack to gigabytes, and whoever may write messages can send such ones. kombu knows no bound, and unpacks a
body before anything else is known of it, its signature included.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from kombu.compression import get_decoder

from ..errors import Unstorable

__all__ = ['TooLarge', 'check_unpacked', 'unpacked']

#: A body may unpack to so many bytes, or to so many times as many as it has. JSON of many similar rows is compressed to a
#: twentieth; and a worker holds as many messages as it has prefetched.
_LEAST, _TIMES = 16_000_000, 30

#: The most streams that a body may be made of, one behind the other.
_STREAMS = 1000

#: What unpacking may take of memory beside the result, in bytes: as much as the highest level of `xz` needs, and more.
_WORKING = 128_000_000


class TooLarge(ValueError):
    """A body would unpack to more than it may."""


def unpacked(body: Any, compression: Any) -> Any:
    """Return a body as it was before `compression`, the name of a method of kombu's; *raises* `ValueError` if it cannot be.

    The bound holds for kombu's own methods; one that an application registers is its own affair.
    """
    try:
        decoder = get_decoder(compression)
    except (KeyError, TypeError):
        raise ValueError(f'it is compressed by {compression!r:.80}, which this process does not know') from None
    most = max(_LEAST, _TIMES * len(body))
    try:
        found = _bounded(decoder, body, most + 1)
        if found is None:
            return decoder(body)
    except Exception as exc:  # each method has errors of its own
        raise ValueError(f'it cannot be decompressed: {exc}') from exc
    if len(found) > most:
        raise TooLarge(f'it decompresses to more than {most:,} bytes, {_TIMES} times its size or {_LEAST:,}')
    return found


def check_unpacked(body: Any, compression: Any) -> None:
    """Raise `Unstorable` for a body that no consumer would unpack: it would be a dead letter."""
    if isinstance(body, bytes) and compression:
        try:
            unpacked(body, compression)
        except TooLarge as exc:
            raise Unstorable(
                f'the message is compressed too well: {exc}; send it without compression, or in parts'
            ) from exc
        except ValueError:
            pass  # it is said to be compressed, and a consumer may know how


def _bounded(decoder: Callable[[Any], Any], body: bytes, most: int) -> bytes | None:
    """Return the first `most` bytes at the most of what kombu's own decoders make of a body, None if this is another one."""
    if decoder is zlib.decompress:
        stream = zlib.decompressobj()
        found = stream.decompress(body, most)
        if len(found) < most and not stream.eof:
            raise ValueError('it was cut off')
        return found
    if decoder is bz2.decompress:
        return _streams(bz2.BZ2Decompressor, body, most)
    if decoder is lzma.decompress:
        return _streams(lambda: lzma.LZMADecompressor(memlimit=_WORKING), body, most)
    module = str(getattr(decoder, '__module__', None) or type(getattr(decoder, '__self__', None)).__module__)
    if 'brotli' in module:
        return _brotli(__import__(module.partition('.')[0]).Decompressor(), body, most)
    if module.startswith('zstandard'):  # kombu before 5.6
        with decoder.__self__.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:  # type: ignore[attr-defined]
            return bytes(reader.read(most))
    if 'zstd' in module:
        zstd = __import__(module.removesuffix('._shared'), fromlist=['ZstdDecompressor'])
        return _streams(zstd.ZstdDecompressor, body, most)
    return None


def _streams(new: Callable[[], Any], body: bytes, most: int) -> bytes:
    """Return what streams, one behind the other, unpack to, up to `most` bytes."""
    found, count = b'', 0
    while body and len(found) < most:
        stream, count = new(), count + 1
        if count > _STREAMS:
            raise ValueError(f'it is made of more than {_STREAMS} streams')
        found += stream.decompress(body, most - len(found))
        if len(found) < most and not stream.eof:
            raise ValueError('it was cut off')
        body = stream.unused_data
    return found


def _brotli(stream: Any, body: bytes, most: int) -> bytes:
    found, step = bytearray(), 64
    for start in range(0, len(body), step):  # a little at a time: old versions take no bound
        found += stream.process(body[start : start + step])
        if len(found) >= most:
            return bytes(found[:most])
    if not stream.is_finished():
        raise ValueError('it was cut off')
    return bytes(found)
