// Factories of a World's communicators, by transport: those of this process's ranks. Each one
// shares ownership of the world state.
#pragma once

#include <memory>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/world.h"

struct ncclComm;
struct CUstream_st;

namespace tandem {

using Communicators = std::vector<std::shared_ptr<Communicator>>;

/// Throws as run_threads.
Communicators new_thread_ranks(const WorldOptions& options);
/// Throws as run_mpi.
Communicators new_mpi_rank(const WorldOptions& options);
/// Throws as run_processes.
Communicators new_process_rank(const WorldOptions& options);
/// Leaves the world of `run_processes`, none of whose communicators may exist: the next call meets
/// the ranks anew, by the launcher's variables as they are then.
void leave_processes();
/// Throws as World::adopt_mpi.
Communicators adopt_mpi_rank(int communicator, const WorldOptions& options);
/// Throws as World::of_gpus.
Communicators new_gpu_ranks(const WorldOptions& options);
/// Throws as World::adopt_nccl.
Communicators adopt_nccl_rank(ncclComm* communicator, CUstream_st* stream,
                              const WorldOptions& options);
/// Throws as World::connect.
Communicators connect_process_rank(int rank, int size, const World::Gather& gather,
                                   const WorldOptions& options);
/// Throws as World::connect_gpus.
Communicators connect_gpu_rank(int rank, int size, const World::Gather& gather, CUstream_st* stream,
                               const WorldOptions& options);

/// Throws Unsupported if mpirun started several processes and this build has no MPI.
void require_mpi_under_mpirun();

}  // namespace tandem
