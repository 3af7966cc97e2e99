// Gathers bytes by a communicator of the caller's, before the ranks have one of their own.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <span>
#include <vector>

namespace tandem::gpu {

/// Collective over `comm`, whose GPU is current: the bytes of all ranks, one after the other. All
/// give equally many. Runs on a stream of its own, behind what was enqueued on `comm` before.
/// Throws Timeout if it has not ended after `deadline_s`: then it goes on, and keeps its memory,
/// until the caller aborts `comm`. Throws DeviceError.
std::vector<std::byte> gather_by_nccl(ncclComm_t comm, std::span<const std::byte> mine,
                                      double deadline_s);

}  // namespace tandem::gpu
