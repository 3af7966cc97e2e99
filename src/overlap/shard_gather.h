// The gather that AG+GEMM and its weight gradient run beside their products.
#pragma once

#include <string_view>

#include "overlap/workspace.h"
#include "tune/candidate.h"

namespace tandem {

/// The [m, k] rows of all ranks, arriving chunk by chunk.
class ShardGather {
 public:
  ShardGather(Communicator& comm, std::string_view op, int64_t m, int64_t k, DType dtype);

  /// Starts a run: sends `x`, this rank's rows, to every peer, in `chunks` transfers. Serial and
  /// gathering runs keep a copy of it in `all()`; `own()` is where to read it.
  void begin(int chunks, const Tensor& x, bool keep);
  /// Returns once chunk `chunk` of `owner`'s rows is here.
  void await(int chunks, int owner, int chunk);
  /// Ends the run: `x` may change.
  void end();
  Tensor all() const;
  Tensor own() const { return own_; }

 private:
  int signal(int owner, int chunk) const { return owner * kMaxChunks + chunk; }

  OverlapWorkspace workspace_;
  int64_t m_, k_;
  DType dtype_;
  Tensor own_;
  bool flush_ = false;
};

}  // namespace tandem
