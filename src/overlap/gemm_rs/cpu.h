// GEMM+RS on CPU ranks: a chunk of an owner's rows leaves as soon as its product is finished; the
// owner sums while later chunks travel.
#pragma once

#include <vector>

#include "overlap/plan.h"
#include "overlap/workspace.h"
#include "tandem/overlap.h"

namespace tandem {

class GemmRsCpu {
 public:
  GemmRsCpu(Communicator& comm, const GemmRs::Shape& shape);
  void run(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias);

 private:
  int signal(int source, int chunk) const { return source * kMaxChunks + chunk; }
  void send(const Plan& plan, int owner, int chunk);
  void reduce(const Plan& plan, int chunk, const Tensor& out, const Tensor* bias);

  int rank_, world_;
  GemmRs::Shape shape_;
  size_t line_;                 ///< bytes of a row of partial sums
  int64_t most_rows_;           ///< of any shard
  OverlapWorkspace workspace_;  ///< shared: [source][most_rows][n]; scratch: [m][n]
  std::vector<const std::byte*> parts_;
};

}  // namespace tandem
