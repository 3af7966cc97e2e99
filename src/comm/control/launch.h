// How a launcher without MPI says which rank a process is: torchrun's environment variables (RANK,
// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or those of srun (SLURM_PROCID,
// SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

struct Launch {
  int rank = 0, size = 1, local_rank = 0;
  std::string host;  ///< rank 0's
  int port = 0;      ///< that rank 0 listens on
};

/// Nothing when no such launcher started this process, or one that started it alone. Throws
/// InvalidArgument for variables that are half there or no numbers in range.
std::optional<Launch> launched_by_environment();

/// The first host of a Slurm node list: "gpu003" of "gpu[003-004,7],login1".
std::string first_host(std::string_view nodes);

/// Which of this host's ranks this process is, as its launcher says (mpirun's too); else `rank`.
int local_rank(int rank);

}  // namespace tandem
