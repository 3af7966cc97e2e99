// Algorithms of a dense operator on GPUs. Those without overlap are serial, whoever wrote their
// kernels: overlap is measured against the fastest of them.
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem::gpu {

enum class Way {
  automatic,    ///< the fastest of the others on this shape, measured once
  serial_nccl,  ///< whole GEMM, NCCL collective
  serial_copy,  ///< whole GEMM, shards moved by the copy engine
  chunked,      ///< a GEMM per shard, overlapped with the copy engine's transfers
  adding,    ///< fused: one GEMM that sends tiles while it runs, and whose local tiles add received
             ///< ones
  fused,     ///< one GEMM whose tiles wait for their shard, or are sent when done
  plain,     ///< whole GEMM, uncompressed collective by kernels (collectives/cuda/part_exchange.h)
  one_shot,  ///< whole GEMM, all-reduce by kernels in one exchange
  two_shot,  ///< whole GEMM, all-reduce by kernels in two exchanges
};
/// Whether the GEMM and the collective run one after the other. The only place that defines this.
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
/// The serial algorithm that uses NCCL.
constexpr bool is_nccl(Way way) {
  return way == Way::serial_nccl;
}
/// Max bytes of a collective by kernels: so short that hiding it may cost more.
constexpr int64_t kMostPlainBytes = int64_t(16) << 20;
constexpr bool has_plain_way(int64_t bytes) {
  return bytes <= kMostPlainBytes;
}
/// Number of times a partial sum is rounded to its dtype before the sum over `ranks` is: by its
/// rank, and by NCCL after every addition, of which there are ranks - 1 including the last.
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
/// Whether an operator constructed with `way` prepares its fused algorithm and measures its
/// variants.
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
