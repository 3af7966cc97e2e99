// The candidates of a dense operator on GPUs: how it can be run. What does not overlap is serial,
// whoever wrote its kernels: the fastest of those is what overlap is measured against.
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem::gpu {

enum class Way {
  automatic,    ///< the fastest of the others on this shape, measured once
  serial_nccl,  ///< whole GEMM, NCCL collective
  serial_copy,  ///< whole GEMM, shards moved by the copy engine
  chunked,      ///< a GEMM per shard under the copy engine's transfers
  adding,       ///< one GEMM whose tiles are moved beside it, and whose own ones add what arrives
  fused,        ///< one GEMM whose tiles wait for their shard, or leave when done
  plain,        ///< whole GEMM, plain collective by kernels (collectives/cuda/part_exchange.h)
  one_shot,     ///< whole GEMM, all-reduce by kernels in one exchange
  two_shot,     ///< whole GEMM, all-reduce by kernels in two exchanges
};
/// Whether the GEMM and the collective run one after the other. The only place that says which do.
constexpr bool is_serial(Way way) {
  switch (way) {
    case Way::serial_nccl:
    case Way::serial_copy:
    case Way::plain:
    case Way::one_shot:
    case Way::two_shot:
      return true;
    case Way::automatic:
    case Way::chunked:
    case Way::adding:
    case Way::fused:
      return false;
  }
  return false;
}
/// Of the serial ones, that of NCCL.
constexpr bool is_nccl(Way way) {
  return way == Way::serial_nccl;
}
/// A plain collective of so many bytes at most is so short that hiding it may cost more.
constexpr int64_t kMostPlainBytes = int64_t(16) << 20;
constexpr bool has_plain_way(int64_t bytes) {
  return bytes <= kMostPlainBytes;
}
/// How often a partial sum is rounded to its dtype on its way into a sum over `ranks`, before that
/// is: by its rank, and by NCCL after every addition, of which there are ranks - 1 with the last.
constexpr int roundings_of(Way way, int ranks) {
  switch (way) {
    case Way::automatic:  // may be any of the others
    case Way::serial_nccl:
      return ranks > 2 ? ranks - 1 : 1;
    case Way::serial_copy:
    case Way::chunked:
    case Way::adding:
    case Way::fused:
    case Way::plain:
    case Way::one_shot:
    case Way::two_shot:
      break;
  }
  return 1;
}
/// Whether an operator constructed with `way` prepares its fused way, and measures its variants.
constexpr bool prepares_fused(Way way) {
  return way == Way::fused || way == Way::automatic;
}
constexpr std::string_view name_of(Way way) {
  switch (way) {
    case Way::automatic:
      return "automatic";
    case Way::serial_nccl:
      return "serial_nccl";
    case Way::serial_copy:
      return "serial_copy";
    case Way::chunked:
      return "chunked";
    case Way::adding:
      return "adding";
    case Way::fused:
      return "fused";
    case Way::plain:
      return "plain";
    case Way::one_shot:
      return "one_shot";
    case Way::two_shot:
      return "two_shot";
  }
  return "?";
}

}  // namespace tandem::gpu
