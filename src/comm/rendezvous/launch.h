// Rank of a process as a launcher without MPI reports it: the environment variables of torchrun,
// which `tandem launch` sets, too (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT, TORCHELASTIC_RUN_ID), or those of srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS,
// SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID).
//
// Ranks of several hosts need a secret, in TANDEM_SECRET or in the file TANDEM_SECRET_FILE: neither
// launcher provides one. srun forwards the environment (`TANDEM_SECRET=$(openssl rand -hex 32) srun
// …`); with torchrun it is set on every host, or in a file of mode 0600 that all hosts see. Ranks
// of one host need none: they connect over a local socket, whose peer's user the system reports.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct Launch {
  int rank = 0, size = 1, local_rank = 0;
  std::string host;        ///< rank 0's: a name, an IPv4 or an IPv6 address
  int port = 0;            ///< port on which rank 0 listens
  std::string port_from;   ///< variable that set the port: "MASTER_PORT=29500"
  bool one_host = false;   ///< all ranks are on this host, as known from the variables
  std::string world;       ///< distinguishes this launch from others with the same secret
  bool has_store = false;  ///< the launcher runs the rendezvous store
};

/// Begin of TORCHELASTIC_RUN_ID in processes that `tandem launch` started: it runs the store.
constexpr std::string_view kLauncherRunId = "tandem launch ";
/// Begin of it in a launch that may have several hosts: its store has a port, also for ranks that
/// are all on one.
constexpr std::string_view kHostsRunId = "tandem launch hosts ";
/// Name of such a launch's world for its store, as rank 0 may listen under that of the launch.
std::string store_world(const std::string& world);

/// Nothing if no such launcher started this process, or one that started only one. Throws
/// InvalidArgument for variables that are incomplete, not numbers or out of range.
std::optional<Launch> launched_by_environment();

/// Names of the variables in this environment with which another launcher (mpirun, srun) tells a
/// process its rank: not for the ranks that this process starts.
std::vector<std::string> variables_of_other_launchers();

/// World size as the launcher of any MPI reports it, which may not be the MPI of this build.
struct MpiLaunch {
  const char* variable;
  int size;
};
/// Nothing without such a launcher. Throws InvalidArgument unless it is a number in range.
std::optional<MpiLaunch> launched_by_some_mpi();

/// First host of a Slurm node list: "gpu003" of "gpu[003-004,7],login1".
std::string first_host(std::string_view nodes);

/// Whether this name means the local host on every host: "localhost", 127.0.0.0/8, ::1.
bool is_loopback(const std::string& host);

/// Index of this process among its host's ranks, as its launcher reports it (mpirun's too); else
/// `rank`.
int local_rank(int rank);

}  // namespace tandem
