"""Decompression of bodies up to a limit (`kombu_couchdb.documents.body`)."""

from __future__ import annotations

import lzma
import os
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
from kombu import compression
from kombu.compression import compress

from kombu_couchdb.documents import body as module
from kombu_couchdb.documents.body import TooLarge, check_unpacked, unpacked
from kombu_couchdb.errors import Unstorable

#: The limit of these tests, in bytes.
LIMIT = 1_000_000

METHODS = ['gzip', 'zlib', 'bzip2', 'lzma', 'xz', 'brotli', 'zstd']


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    if request.param not in compression._aliases and request.param not in compression.encoders():
        pytest.skip(f'the package for {request.param} is not installed')
    return str(request.param)


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_MIN_LIMIT_BYTES', LIMIT)


@pytest.mark.parametrize('body', [b'', os.urandom(10_000), b'[[1], {}, {}]' * 10_000, bytes(LIMIT)], ids=len)
def test_compressed_body_survives_a_round_trip(method: str, body: bytes) -> None:
    packed, kind = compress(body, method)
    assert unpacked(packed, kind) == body
    check_unpacked(packed, kind)


def test_decompression_stops_at_the_limit(method: str) -> None:
    packed, kind = compress(bytes(20 * LIMIT), method)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match='it decompresses to more than 1,000,000 bytes'):
            unpacked(packed, kind)
        assert tracemalloc.get_traced_memory()[1] < 15 * LIMIT
    finally:
        tracemalloc.stop()
    with pytest.raises(Unstorable, match='the message is compressed too well'):
        check_unpacked(packed, kind)


def test_decompression_that_needs_too_much_memory() -> None:
    """One byte in the header of a tiny body says how much memory it takes to decompress it."""
    packed = bytearray(lzma.compress(b'hello', filters=[{'id': lzma.FILTER_LZMA2, 'dict_size': 1 << 16}]))
    block = packed[12 : 12 + 4 * (packed[12] + 1)]
    block[4] = 36  # 1 GiB
    packed[12 : 12 + len(block)] = block[:-4] + zlib.crc32(block[:-4]).to_bytes(4, 'little')
    with pytest.raises(ValueError, match='it cannot be decompressed: Memory usage limit exceeded'):
        unpacked(bytes(packed), 'xz')


def test_large_body_may_grow_thirtyfold() -> None:
    body = os.urandom(100_000) + bytes(2_500_000)
    assert unpacked(*compress(body, 'gzip')) == body


def test_truncated_or_wrong_data_is_an_error(method: str) -> None:
    packed, kind = compress(b'hello' * 1000, method)
    for body in (packed[:-6], b'x' + packed, b'garbage'):
        with pytest.raises(ValueError, match='it cannot be decompressed'):
            unpacked(body, kind)


@pytest.mark.parametrize('method', ['bzip2', 'lzma'])
def test_concatenated_streams(method: str) -> None:
    packed, kind = compress(b'ab', method)
    assert unpacked(packed * 3, kind) == b'ababab'
    with pytest.raises(ValueError, match='more than 1000 streams'):
        unpacked(packed * 1001, kind)


@pytest.mark.parametrize('kind', ['unknown', 5, ['gzip'], {'x': 1}])
def test_unknown_method(kind: object) -> None:
    with pytest.raises(ValueError, match='which this process does not know'):
        unpacked(b'x', kind)
    check_unpacked(b'x', kind)


@pytest.fixture
def own() -> Iterator[str]:
    compression.register(lambda body: body[::-1], lambda body: body[::-1], 'application/x-own')
    yield 'application/x-own'
    del compression._encoders['application/x-own'], compression._decoders['application/x-own']


def test_methods_registered_by_an_application_are_used(own: str) -> None:
    assert unpacked(b'abc', own) == b'cba'
