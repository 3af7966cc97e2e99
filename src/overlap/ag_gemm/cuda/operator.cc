#include "overlap/ag_gemm/operator.h"

#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_gemm/cuda/encoded_ag.h"
#include "overlap/contract/cuda/gpu_operator.h"
#include "overlap/gather/cuda/multi_node.h"

namespace tandem {

std::unique_ptr<OverlapOperator> ag_gemm_on_gpu(Communicator& comm, const OpDesc& desc,
                                                const OverlapOptions& options) {
  return gpu::make_gpu_operator<gpu::AgGemm>(comm, desc, options,
                                             {gpu::make_across_nodes, gpu::EncodedAgOp::make});
}

}  // namespace tandem
