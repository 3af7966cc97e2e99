// What one rank does when this program is started as one of several processes (gpu_test --rank
// SCENARIO), by processes_test.cc, mpirun, torchrun or srun.
#pragma once

#include <string>

namespace tandem::test {

constexpr int kRight = 0, kWrong = 1, kNamedTheLastRank = 20;

/// "work": operators and collectives, checked. "backward": weight gradients and kept gathers.
/// "absent": as "work", but a rank was never started. "die": the last rank kills itself between
/// calls. "die_in_nccl": the same under NCCL's own ways. "loaded": all kernels are there before any
/// call. "timed", "kept": the algorithm of a product is timed, or that of an earlier run is taken.
int run_as_rank(const std::string& scenario);

}  // namespace tandem::test
