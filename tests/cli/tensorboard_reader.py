#!/usr/bin/env python3
"""tensorboard_reader.py OUT: the event file of a run has the numbers of its metrics.jsonl, by a reader that shares no code with
its writer, and by tensorboard's if that is installed."""
import json
import pathlib
import struct
import sys

from protobuf_reader import fields


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff


def records(data):
    while data:
        length, = struct.unpack_from("<Q", data)
        body = data[12:12 + length]
        check, = struct.unpack_from("<I", data, 8)
        body_check, = struct.unpack_from("<I", data, 12 + length)
        assert check == masked(data[:8]) and body_check == masked(body), "a checksum"
        yield body
        data = data[16 + length:]


def main():
    out = pathlib.Path(sys.argv[1])
    assert crc32c(b"123456789") == 0xe3069283, "this reader"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    head, *events = [dict(fields(record)) for record in records((out / "tensorboard/events.out.tfevents.tandem").read_bytes())]
    assert head[3] == b"brain.Event:2", head
    assert len(events) == len(lines) > 0, (len(events), len(lines))
    times = [event[1] for event in events]
    assert times == sorted(times) and head[1] == times[0], times
    names = set()
    for line, event in zip(lines, events):
        for key in [key for key, value in line.items() if isinstance(value, dict)]:
            line |= {f"{key}.{part}": value for part, value in line.pop(key).items()}
        assert event[2] == line["step"], (event, line)
        found = {}
        for number, value in fields(event[5]):
            assert number == 1
            scalar = dict(fields(value))
            found[scalar[1].decode()] = scalar[2]
        for name, value in found.items():
            assert value == struct.unpack("<f", struct.pack("<f", line[name.split("/")[1]]))[0], (name, value, line)
        assert len(found) == sum(isinstance(value, (int, float)) for value in line.values()) - 1, (found, line)
        names |= set(found)
    assert {"training/loss", "speed/step_ms"} <= names, names
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return
    log = EventAccumulator(str(out / "tensorboard"))
    log.Reload()
    assert set(log.Tags()["scalars"]) == names, log.Tags()
    assert [(event.step, event.value) for event in log.Scalars("training/loss")] == [
        (line["step"], struct.unpack("<f", struct.pack("<f", line["loss"]))[0]) for line in lines]
    print("tensorboard reads it")


main()
