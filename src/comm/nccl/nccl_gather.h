// A communicator of the caller's as a way to gather bytes, before there is any other.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <span>
#include <vector>

namespace tandem::gpu {

/// Collective over `comm`, whose GPU is current: the bytes of all ranks, one after the other. All
/// bring as many. On a stream of its own, behind what was enqueued on `comm` before. Throws Timeout
/// when it has not ended after `deadline_s`: it remains under way then, with the memory that it
/// uses, until the caller aborts `comm`. Throws DeviceError.
std::vector<std::byte> gather_by_nccl(ncclComm_t comm, std::span<const std::byte> mine,
                                      double deadline_s);

}  // namespace tandem::gpu
