// Collectives of the library under a transport, for comparison with Tandem's. `mpi` has those of
// MPI; `threads` has none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/dtype.h"

namespace tandem {

enum class NativeOp : uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast };

/// Counts are elements per rank; reductions are sums. `send` and `receive` differ, except in a
/// broadcast from rank 0, which uses only `receive`.
struct NativeCall {
  NativeOp op = NativeOp::all_reduce;
  DType dtype = DType::f32;
  const void* send = nullptr;
  void* receive = nullptr;
  std::vector<int64_t> send_counts, receive_counts;
  std::shared_ptr<void> memory;  ///< owner of `send` and `receive`
};

/// Name such as "MPI_Allreduce"; empty if there is nothing to call: another transport, part of a
/// world, counts beyond what it can express, a dtype other than f32 and bf16.
std::string native_name(const Communicator& comm, const NativeCall& call);

/// Collective. Returns the seconds between the moment all ranks were ready and the end on this
/// rank. Throws Timeout after the communicator's deadline.
double run_native(Communicator& comm, const NativeCall& call);

}  // namespace tandem
