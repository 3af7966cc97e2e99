#include "overlap/gemm_rs/operator.h"

#include "overlap/contract/cuda/gpu_operator.h"
#include "overlap/gather/cuda/multi_node.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "overlap/scatter/cuda/encoded_rs.h"

namespace tandem {

std::unique_ptr<OverlapOperator> gemm_rs_on_gpu(Communicator& comm, const OpDesc& desc,
                                                const OverlapOptions& options) {
  return gpu::make_gpu_operator<gpu::GemmRs>(comm, desc, options,
                                             {gpu::make_across_nodes, gpu::EncodedRsOp::make});
}

}  // namespace tandem
