// One rank of several processes (gpu_test --rank SCENARIO), started by processes_test.cc, mpirun,
// torchrun or srun.
#pragma once

#include <string>

namespace tandem::test {

constexpr int kRight = 0, kWrong = 1, kNamedTheLastRank = 20;

/// "work": operators and collectives, checked. "backward": weight gradients and saved gathers.
/// "absent": as "work", but one rank was never started. "die": the last rank kills itself between
/// calls. "die_in_nccl": the same during NCCL's algorithms. "loaded": all kernels are loaded before
/// any call. "lost_gpu": an illegal access, which is final. "timed", "kept": a GEMM algorithm is
/// timed, or read from an earlier run's cache.
int run_as_rank(const std::string& scenario);

}  // namespace tandem::test
