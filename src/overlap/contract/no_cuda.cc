// Stub of the operators on GPUs for a build without CUDA: no communicator reaches it.
#include "overlap/contract/operator.h"
#include "overlap/moe/on_ranks.h"

namespace tandem {

std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator&, const OpDesc&,
                                                   const OverlapOptions&) {
  throw Unsupported("operators on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

std::unique_ptr<MoeOnRanks> make_gpu_moe(Communicator&, const MoeShape&, const MoeOptions&) {
  throw Unsupported("moe on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace tandem
