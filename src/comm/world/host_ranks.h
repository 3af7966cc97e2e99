// Calls for the host of a rank, on a CPU or a GPU.
#pragma once

#include <exception>
#include <memory>

#include "tandem/communicator.h"

namespace tandem {

/// Communicator of the same ranks, on the host also if they are GPUs: its tensors are in host
/// memory. Another thread may use it while this one uses `comm`, which must outlive it. Collective.
std::unique_ptr<Communicator> split_on_host(Communicator& comm);

/// Ends, after an error, what this rank's work on a GPU waits for, of `comm` and its splits: the
/// memory can then be freed though other ranks are lost. Nothing on CPU ranks.
void abandon_gpu_work(Communicator& comm);

/// Whether work of this rank on a GPU, of `comm` and its splits, has gone on without what it waited
/// for: its results are not valid. False on CPU ranks, which throw instead. Any thread.
bool has_abandoned_gpu_work(Communicator& comm);

/// Calls abandon_gpu_work if an error ends its scope.
class AbandonOnError {
 public:
  explicit AbandonOnError(Communicator& comm) : comm_(comm), errors_(std::uncaught_exceptions()) {}
  ~AbandonOnError() {
    if (std::uncaught_exceptions() > errors_) abandon_gpu_work(comm_);
  }
  AbandonOnError(const AbandonOnError&) = delete;
  AbandonOnError& operator=(const AbandonOnError&) = delete;

 private:
  Communicator& comm_;
  const int errors_;
};

}  // namespace tandem
