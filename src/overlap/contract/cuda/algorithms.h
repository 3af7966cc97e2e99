// Algorithms of a dense operator on GPUs. Those without overlap are serial, whoever wrote their
// kernels: overlap is measured against the fastest of them.
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem::gpu {

enum class Algorithm {
  automatic,    ///< the fastest of the others on this shape, measured once
  serial_nccl,  ///< whole GEMM, NCCL collective
  serial_copy,  ///< whole GEMM, shards moved by the copy engine
  chunked,      ///< a GEMM per shard, overlapped with the copy engine's transfers
  fused,        ///< one GEMM whose tiles wait for their shard, or are sent when done; GEMM+RS adds
                ///< received tiles in its main loop
  fused_cutlass,   ///< GEMM+RS on CUTLASS's GEMM: local tiles add received ones in their epilogue
  serial_kernels,  ///< whole GEMM, uncompressed collective by kernels
                   ///< (collectives/cuda/shard_exchange.h)
  one_shot,        ///< whole GEMM, all-reduce by kernels in one exchange
  two_shot,        ///< whole GEMM, all-reduce by kernels in two exchanges
};
/// Whether the GEMM and the collective run one after the other. The only place that defines this.
constexpr bool is_serial(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::serial_nccl:
    case Algorithm::serial_copy:
    case Algorithm::serial_kernels:
    case Algorithm::one_shot:
    case Algorithm::two_shot:
      return true;
    case Algorithm::automatic:
    case Algorithm::chunked:
    case Algorithm::fused:
    case Algorithm::fused_cutlass:
      return false;
  }
  return false;
}
/// The serial algorithm that uses NCCL.
constexpr bool is_nccl(Algorithm algorithm) {
  return algorithm == Algorithm::serial_nccl;
}
/// Max bytes of a collective by kernels: so short that hiding it may cost more.
constexpr int64_t kMaxSerialKernelBytes = int64_t(16) << 20;
constexpr bool has_serial_kernels(int64_t bytes) {
  return bytes <= kMaxSerialKernelBytes;
}
/// Number of times a partial sum is rounded to its dtype before the sum over `ranks` is: by its
/// rank, and by NCCL after every addition, of which there are ranks - 1 including the last.
constexpr int roundings_of(Algorithm algorithm, int ranks) {
  switch (algorithm) {
    case Algorithm::automatic:  // may be any of the others
    case Algorithm::serial_nccl:
      return ranks > 2 ? ranks - 1 : 1;
    case Algorithm::serial_copy:
    case Algorithm::chunked:
    case Algorithm::fused:
    case Algorithm::fused_cutlass:
    case Algorithm::serial_kernels:
    case Algorithm::one_shot:
    case Algorithm::two_shot:
      break;
  }
  return 1;
}
/// Whether an operator constructed with `algorithm` prepares its fused algorithms and measures
/// their variants.
constexpr bool prepares_fused(Algorithm algorithm) {
  return algorithm == Algorithm::fused || algorithm == Algorithm::fused_cutlass ||
         algorithm == Algorithm::automatic;
}
constexpr std::string_view name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic:
      return "automatic";
    case Algorithm::serial_nccl:
      return "serial_nccl";
    case Algorithm::serial_copy:
      return "serial_copy";
    case Algorithm::chunked:
      return "chunked";
    case Algorithm::fused:
      return "fused";
    case Algorithm::fused_cutlass:
      return "fused_cutlass";
    case Algorithm::serial_kernels:
      return "serial_kernels";
    case Algorithm::one_shot:
      return "one_shot";
    case Algorithm::two_shot:
      return "two_shot";
  }
  return "?";
}

}  // namespace tandem::gpu
