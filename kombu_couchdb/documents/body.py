"""Message bodies: how they are stored, decompressed and decoded.

A body is in the document, as text or base64; a large one is an attachment.

The body of a unique job always stays in the document, whatever its size (see `workitem.new`).

A document whose body is an attachment is read and written without its body: readers get a *stub*, and write the stub
back. So claims, releases and dead letters cost the same for a message of 20 kB and for one of 20 MB.

Decompression has a limit: a few kilobytes may decompress to gigabytes, and every publisher can send such a body. kombu
has no limit, and decompresses a body before it checks anything else, the signature included.
"""

from __future__ import annotations

import base64
import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from kombu.compression import get_decoder
from kombu.serialization import loads

from ..errors import Unstorable
from .task_message import content_problem
from .types import Attachment, Document, Message

#: The name and type of the attachment, which contains the bytes of the body. CouchDB would compress an attachment of a
#: text type.
NAME, _TYPE = 'body', 'application/octet-stream'

#: The maximum length of a body in the document, in characters as stored; longer ones are attached. (Measured on CouchDB
#: 3.5: see docs/development/costs.rst.)
MAX_INLINE = 16_000


def encoded(body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
    """Return a body as it is stored, and its `body_encoding`; `encoding` is the message's `content-encoding`."""
    if isinstance(body, bytes) and str(encoding).lower() in ('utf-8', 'utf8', 'us-ascii', 'ascii'):
        try:
            return body.decode('utf-8'), 'utf-8'
        except UnicodeDecodeError:
            pass  # the message declares a text encoding, but the body is not text
    if isinstance(body, bytes):
        return base64.b64encode(body).decode('ascii'), 'base64'
    return body, 'utf-8'


def decoded(body: Any, body_encoding: str | None = None) -> Any:
    """Return a body as it was published, from a document's member (text) or an attachment (bytes).

    *Raises* `ValueError` if the stored body or its `body_encoding` is malformed.
    """
    if body_encoding not in ('base64', 'utf-8', None):
        raise ValueError(f'unknown body_encoding {body_encoding!r}')
    if isinstance(body, bytes):
        return body if body_encoding == 'base64' else body.decode('utf-8')
    return base64.b64decode(body, validate=True) if body_encoding == 'base64' else body


def is_large(message: Mapping[str, Any]) -> bool:
    """Tell whether the body of a message is large enough to be attached."""
    body = message.get('body')
    return isinstance(body, str) and len(body) > MAX_INLINE


def attached(message: Message) -> tuple[Message, dict[str, Attachment]]:
    """Return the message without its body, and the `_attachments` of its document, which contain the body.

    *Raises* `Unstorable` if the body contains half of a surrogate pair.
    """
    body, properties = message['body'] or '', message.get('properties') or {}
    if properties.get('body_encoding') != 'base64':
        try:
            body = base64.b64encode(body.encode('utf-8')).decode('ascii')
        except UnicodeEncodeError as exc:
            raise Unstorable('the body contains half of a surrogate pair, which is not valid text') from exc
    return {**message, 'body': None}, {NAME: {'content_type': _TYPE, 'data': body}}


def attachments_with(content: bytes) -> dict[str, Attachment]:
    """Return the `_attachments` of a copy of a document; `content` is that of the attachment with the body."""
    return {NAME: {'content_type': _TYPE, 'data': base64.b64encode(content).decode('ascii')}}


def body_stub(doc: Mapping[str, Any]) -> Document | None:
    """Return the stub of the attachment that contains the body of a document; None if the body is in the document."""
    message, attachments = doc.get('message'), doc.get('_attachments')
    if (
        'key' in doc
        or not isinstance(message, dict)
        or message.get('body') is not None
        or not isinstance(attachments, dict)
    ):
        return None
    found = attachments.get(NAME)
    return found if isinstance(found, dict) and isinstance(found.get('length'), int) else None


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
    if reason := content_problem(message):
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
