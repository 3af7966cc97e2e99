// Every environment variable Tandem reads, in one place. Read once, at first use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Seconds. The longest, 30 years, still fits beside a clock's nanoseconds in 64 bits.
constexpr double kLeastDeadline = 0.001, kMostDeadline = 1e9;

struct Env {
  double deadline_s;      ///< TANDEM_DEADLINE_S: seconds a wait lasts at most (60)
  std::string cache_dir;  ///< TANDEM_CACHE_DIR: tuner cache ($XDG_CACHE_HOME or ~/.cache, /tandem)
  bool tune;  ///< TANDEM_TUNE: measure what no times are known of (1), or take the first
  std::string log_level;  ///< TANDEM_LOG: trace, debug, info, warn, error (info)
  int threads;            ///< TANDEM_THREADS: CPU threads of one rank (0: cores / local ranks)
  bool mpi_shm;           ///< TANDEM_MPI_SHM: ranks of one host share memory (1) or not (0)
  std::string mpi_wire;   ///< TANDEM_MPI_WIRE: between hosts, tcp, mpi or auto (auto)
  bool gpu_portable;      ///< TANDEM_GPU_PORTABLE: no kernel that is for one GPU architecture (0)
  bool graphs;         ///< TANDEM_GRAPHS: GPU operators replay calls or pushes as CUDA graphs (1)
  std::string secret;  ///< TANDEM_SECRET: what ranks prove to know (none); never printed
  std::string secret_file;  ///< TANDEM_SECRET_FILE: the file that has it, of mode 0600 (none)
  bool allow_mixed_builds;  ///< TANDEM_ALLOW_MIXED_BUILDS: ranks may run different programs (0)
  std::string link;         ///< TANDEM_LINK: what mpi and processes call the network (the wire)
};

/// Throws InvalidArgument naming the variable, its value and what was expected.
const Env& env();

/// Those that decide which calls a rank makes, as text: the same on every rank of a world.
std::string shared_settings();

/// `seconds`; throws InvalidArgument naming it as `what` unless a wait can last that long.
double checked_deadline(double seconds, std::string_view what);
/// Of a world whose options say `seconds`: TANDEM_DEADLINE_S where that is 0.
double world_deadline(double seconds);

/// One line for each TANDEM_ variable that is set and means nothing: a likely misspelling.
std::vector<std::string> unknown_variables();

}  // namespace tandem
