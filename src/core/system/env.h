// All environment variables that Tandem reads. Read once, at first use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Bounds of a deadline in seconds. The max, 30 years, added to a clock's nanoseconds still fits 64
/// bits.
constexpr double kMinDeadline = 0.001, kMaxDeadline = 1e9;

struct Env {
  double deadline_s;      ///< TANDEM_DEADLINE_S: max seconds of a wait (60)
  std::string cache_dir;  ///< TANDEM_CACHE_DIR: tuner cache ($XDG_CACHE_HOME or ~/.cache, /tandem)
  bool tune;  ///< TANDEM_TUNE: time candidates without known times (1), or use the first
  std::string log_level;      ///< TANDEM_LOG: trace, debug, info, warn, error (info)
  int threads;                ///< TANDEM_THREADS: CPU threads of one rank (0: cores / local ranks)
  bool mpi_shm;               ///< TANDEM_MPI_SHM: ranks of one host share memory (1) or not (0)
  std::string mpi_transport;  ///< TANDEM_MPI_TRANSPORT: between hosts, tcp, mpi or auto (auto)
  std::string device;  ///< TANDEM_DEVICE: of commands without --device: auto, cpu or gpu (auto)
  bool gpu_portable;   ///< TANDEM_GPU_PORTABLE: no architecture-specific kernels (0)
  bool graphs;         ///< TANDEM_GRAPHS: GPU operators replay calls or pushes as CUDA graphs (1)
  std::string secret;  ///< TANDEM_SECRET: shared secret of the ranks (none); never printed
  std::string secret_file;  ///< TANDEM_SECRET_FILE: file with the secret, mode 0600 (none)
  bool allow_mixed_builds;  ///< TANDEM_ALLOW_MIXED_BUILDS: ranks may run different programs (0)
  bool check_messages;      ///< TANDEM_CHECK_MESSAGES: hash every message over sockets (0)
  bool strict;              ///< TANDEM_STRICT: refuse operators that would not run as asked (0)
  std::string link;         ///< TANDEM_LINK: network name for mpi and processes (the transport)
  int snapshot_memory;  ///< TANDEM_SNAPSHOT_MEMORY: file descriptor of the launcher's memory for
                        ///< snapshots
                        ///< (-1: none); `tandem launch` sets it
  bool saves_snapshot;  ///< TANDEM_SNAPSHOT_TO_DISK: train only writes the newest one in memory to
                        ///< disk (0); `tandem launch` sets it
  std::string api_key;  ///< TANDEM_API_KEY: key that clients of `tandem serve` must give (none);
                        ///< never printed
};

/// Throws InvalidArgument with the variable, its value and the expected form.
const Env& env();

/// Settings that decide which calls a rank makes, as text: must be the same on every rank of a
/// world.
std::string shared_settings();

/// Returns `seconds`. Throws InvalidArgument, naming it as `what`, unless it is a valid deadline.
double checked_deadline(double seconds, std::string_view what);
/// Deadline of a world whose options give `seconds`; 0: TANDEM_DEADLINE_S.
double world_deadline(double seconds);

/// One line for each TANDEM_ variable that is set but unknown: a likely misspelling.
std::vector<std::string> unknown_variables();

}  // namespace tandem
