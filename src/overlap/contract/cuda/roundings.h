// Roundings by candidate of a dense operator on GPUs, for error bounds.
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem::gpu {

/// The serial candidate whose collective is NCCL's.
constexpr std::string_view kNccl = "serial_nccl";
/// GEMM+AR's serial candidates whose all-reduce is by kernels, in one exchange and in two.
constexpr std::string_view kOneShot = "one_shot", kTwoShot = "two_shot";

/// Number of times a partial sum is rounded to its dtype before the sum over `ranks` is: by its
/// rank, and by NCCL after every addition, of which there are ranks - 1 including the last.
constexpr int roundings_of(std::string_view candidate, int ranks) {
  return candidate == kNccl && ranks > 2 ? ranks - 1 : 1;
}
/// Whether the sum is rounded before a residual is added to it.
constexpr bool rounds_sum(std::string_view candidate) {
  return candidate != kOneShot && candidate != kTwoShot;
}

}  // namespace tandem::gpu
