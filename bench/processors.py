"""Processors of this machine, as results name them."""
import platform


def cpu():
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{len(models)}x {models[0]}" if models else platform.processor()
