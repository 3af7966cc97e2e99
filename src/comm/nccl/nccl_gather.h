// Gather of bytes over the caller's communicator, before the ranks have their own.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <span>
#include <vector>

namespace tandem::gpu {

/// Collective over `comm`, whose GPU is current: the bytes of all ranks, concatenated. All pass the
/// same number of bytes. Runs on its own stream, after work enqueued on `comm` before. Throws
/// Timeout if it has not ended after `deadline_s`: it then continues, and its memory stays
/// allocated, until the caller aborts `comm`. Throws DeviceError.
std::vector<std::byte> gather_by_nccl(ncclComm_t comm, std::span<const std::byte> local,
                                      double deadline_s);

}  // namespace tandem::gpu
