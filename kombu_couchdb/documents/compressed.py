"""Decompression of bodies, with a limit of their size, and their decoding.

A few kilobytes may decompress to gigabytes, and every publisher can send such a body. kombu has no limit, and
decompresses a body before it checks anything else, the signature included.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from kombu.compression import get_decoder
from kombu.serialization import loads

from ..errors import Unstorable
from .task_message import content_flaw

__all__ = ['TooLarge', 'check_unpacked', 'loaded', 'unpacked']

#: A body may decompress to this number of bytes, or to this many times its own size if that is more. JSON of many
#: similar rows is compressed to 5 % of its size. A worker has one such body in memory for each prefetched message.
_MIN_LIMIT_BYTES, _MAX_RATIO = 16_000_000, 30

#: The maximum number of streams that a body may consist of, one after the other.
_MAX_STREAMS = 1000

#: The memory that decompression may use beside the result, in bytes: more than the highest level of `xz` needs.
_MAX_WORKING_BYTES = 128_000_000


class TooLarge(ValueError):
    """A body would decompress to more than the limit."""


def unpacked(body: Any, compression: Any) -> Any:
    """Return a decompressed body; *raises* `ValueError` if that fails, `TooLarge` above the limit.

    `compression` is the name of a method in kombu's registry. The limit applies to kombu's own methods, and not to
    those that an application registers.
    """
    try:
        decoder = get_decoder(compression)
    except (KeyError, TypeError):
        raise ValueError(f'it is compressed by {compression!r:.80}, which this process does not know') from None
    limit = max(_MIN_LIMIT_BYTES, _MAX_RATIO * len(body))
    try:
        found = _bounded(decoder, body, limit + 1)
        if found is None:
            return decoder(body)
    except Exception as exc:  # each method has errors of its own
        raise ValueError(f'it cannot be decompressed: {exc}') from exc
    if len(found) > limit:
        raise TooLarge(
            f'it decompresses to more than {limit:,} bytes, {_MAX_RATIO} times its size or {_MIN_LIMIT_BYTES:,}'
        )
    return found


def loaded(message: Mapping[str, Any], body: Any, accept: Any) -> Any:
    """Return the decompressed and decoded `body` of a message; `accept` are the content types that kombu may decode.

    *Raises* `ValueError`, kombu's `ContentDisallowed` and `DecodeError`, and what a serializer raises.
    """
    if reason := content_flaw(message):
        raise ValueError(reason)
    if compression := message['headers'].get('compression'):
        body = unpacked(body, compression)
    return loads(body, message.get('content-type'), message.get('content-encoding'), accept=accept)


def check_unpacked(body: Any, compression: Any) -> None:
    """Raise `Unstorable` if a body decompresses to more than the limit: its message would become a dead letter."""
    if isinstance(body, bytes) and compression:
        try:
            unpacked(body, compression)
        except TooLarge as exc:
            raise Unstorable(
                f'the message is compressed too well: {exc}; send it without compression, or in parts'
            ) from exc
        except ValueError:
            pass  # a consumer may know a method that this process does not know


def _bounded(decoder: Callable[[Any], Any], body: bytes, most: int) -> bytes | None:
    """Return up to `most` bytes of a decompressed body; None if `decoder` is not from kombu."""
    if decoder is zlib.decompress:
        stream = zlib.decompressobj()
        found = stream.decompress(body, most)
        if len(found) < most and not stream.eof:
            raise ValueError('it was cut off')
        return found
    if decoder is bz2.decompress:
        return _streams(bz2.BZ2Decompressor, body, most)
    if decoder is lzma.decompress:
        return _streams(lambda: lzma.LZMADecompressor(memlimit=_MAX_WORKING_BYTES), body, most)
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
    """Return up to `most` bytes of a body that consists of streams, one after the other."""
    found, count = b'', 0
    while body and len(found) < most:
        stream, count = new(), count + 1
        if count > _MAX_STREAMS:
            raise ValueError(f'it is made of more than {_MAX_STREAMS} streams')
        found += stream.decompress(body, most - len(found))
        if len(found) < most and not stream.eof:
            raise ValueError('it was cut off')
        body = stream.unused_data
    return found


def _brotli(stream: Any, body: bytes, most: int) -> bytes:
    found, step = bytearray(), 64
    for start in range(0, len(body), step):  # in small steps: old versions have no limit of their output
        found += stream.process(body[start : start + step])
        if len(found) >= most:
            return bytes(found[:most])
    if not stream.is_finished():
        raise ValueError('it was cut off')
    return bytes(found)
