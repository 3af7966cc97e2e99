#include "overlap/ag_wgrad/operator.h"

#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/contract/cuda/gpu_operator.h"
#include "overlap/gather/cuda/multi_node.h"

namespace tandem {

std::unique_ptr<OverlapOperator> ag_wgrad_on_gpu(Communicator& comm, const OpDesc& desc,
                                                 const OverlapOptions& options) {
  return gpu::make_gpu_operator<gpu::AgWgrad>(comm, desc, options, {gpu::make_across_nodes});
}

}  // namespace tandem
