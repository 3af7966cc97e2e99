// Shared by the collectives as functions and as objects. `run_*` execute without the GIL; on a GPU
// they are ordered with the current stream of x's framework.
#pragma once

#include "tandem/collectives.h"

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "comm.h"
#include "integer.h"
#include "operand.h"
#include "wire.h"

namespace tandem::python {

using Counts = std::vector<int64_t>;

struct SumKind {
  /// Throws InvalidArgument naming `name` for another op, or for a codec with an op other than sum.
  SumKind(const char* name, const std::string& op_name, nb::handle codec);

  const ReduceOp op;
  const Wire wire;
};

/// A residual as passed from Python, or None.
class Feedback {
 public:
  /// Throws InvalidArgument naming `name` for a residual without a codec.
  Feedback(const char* name, const SumKind& kind, nb::handle residual);
  const Tensor* tensor() const { return operand_ ? &operand_->tensor() : nullptr; }

 private:
  std::optional<Operand> operand_;
};

std::vector<int64_t> shape_of(const Tensor& tensor);
/// Collective: gathers every rank's numbers, by rank.
std::vector<Counts> exchange(Communicator& comm, const Counts& local, const char* what);
Counts even_counts(int64_t rows, int size);
/// Throws InvalidArgument unless there is one count for each rank, at least 0, and as their sum
/// int64.
void check_counts(const Counts& counts, int size, const char* name);
/// Sum of rows of all ranks. Throws InvalidArgument naming `what` if it is no int64.
int64_t sum_of(std::string_view what, const Counts& rows);

void run_all_reduce(Comm& comm, nb::handle x, const Tensor& data, const SumKind& kind,
                    const Tensor* residual);
void run_all_gather(Comm& comm, nb::handle x, const Tensor& shard, const Tensor& out,
                    const Wire& wire);
void run_reduce_scatter(Comm& comm, nb::handle x, const Tensor& data, const Tensor& shard,
                        const SumKind& kind, const Tensor* residual);
void run_all_to_all(Comm& comm, nb::handle x, const Tensor& send, const Counts& send_counts,
                    const Tensor& recv, const Counts& recv_counts, const Wire& wire);

}  // namespace tandem::python
