// How a launcher without MPI says which rank a process is: torchrun's environment variables (RANK,
// WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID), or
// those of srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST,
// SLURM_JOB_ID, SLURM_STEP_ID).
//
// Ranks of several hosts need a secret, in TANDEM_SECRET or in the file TANDEM_SECRET_FILE: neither
// launcher gives one. srun passes the environment on (`TANDEM_SECRET=$(openssl rand -hex 32) srun
// …`); with torchrun it is set on every host, or in a file of mode 0600 that all hosts see. Ranks
// of one host need none: they meet on a local socket, and the system says whose the other end is.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

struct Launch {
  int rank = 0, size = 1, local_rank = 0;
  std::string host;       ///< rank 0's: a name, an IPv4 or an IPv6 address
  int port = 0;           ///< that rank 0 listens on
  std::string port_from;  ///< the variable that gave the port: "MASTER_PORT=29500"
  bool one_host = false;  ///< all ranks are on this host: known from the variables alone
  std::string world;      ///< what tells this launch from another's with the same secret
};

/// Nothing when no such launcher started this process, or one that started it alone. Throws
/// InvalidArgument for variables that are half there or no numbers in range.
std::optional<Launch> launched_by_environment();

/// The size of the world as the launcher of some MPI says it, which need not be the MPI of this
/// build.
struct MpiLaunch {
  const char* variable;
  int size;
};
/// Nothing without such a launcher. Throws InvalidArgument for no number in range.
std::optional<MpiLaunch> launched_by_some_mpi();

/// The first host of a Slurm node list: "gpu003" of "gpu[003-004,7],login1".
std::string first_host(std::string_view nodes);

/// Whether every host knows itself by this name: "localhost", 127.0.0.1 and its like, ::1.
bool is_loopback(const std::string& host);

/// Which of this host's ranks this process is, as its launcher says (mpirun's too); else `rank`.
int local_rank(int rank);

}  // namespace tandem
