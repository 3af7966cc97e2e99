#include "overlap/gemm_ar/operator.h"

#include "overlap/contract/cuda/gpu_operator.h"
#include "overlap/gather/cuda/multi_node.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/scatter/cuda/encoded_rs.h"

namespace tandem {

std::unique_ptr<OverlapOperator> gemm_ar_on_gpu(Communicator& comm, const OpDesc& desc,
                                                const OverlapOptions& options) {
  return gpu::make_gpu_operator<gpu::GemmAr>(comm, desc, options,
                                             {gpu::make_across_nodes, gpu::EncodedRsOp::make});
}

}  // namespace tandem
