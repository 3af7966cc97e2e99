// Stub of the operators on GPUs for a build without CUDA: no communicator reaches it.
#include "overlap/ag_gemm/operator.h"
#include "overlap/ag_wgrad/operator.h"
#include "overlap/gemm_ar/operator.h"
#include "overlap/gemm_rs/operator.h"
#include "overlap/moe/on_ranks.h"
#include "tandem/error.h"

namespace tandem {
namespace {

[[noreturn]] void refuse(std::string_view what) {
  throw Unsupported(std::string(what) +
                    " on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace

std::unique_ptr<OverlapOperator> ag_gemm_on_gpu(Communicator&, const OpDesc&,
                                                const OverlapOptions&) {
  refuse("ag_gemm");
}

std::unique_ptr<OverlapOperator> gemm_rs_on_gpu(Communicator&, const OpDesc&,
                                                const OverlapOptions&) {
  refuse("gemm_rs");
}

std::unique_ptr<OverlapOperator> gemm_ar_on_gpu(Communicator&, const OpDesc&,
                                                const OverlapOptions&) {
  refuse("gemm_ar");
}

std::unique_ptr<OverlapOperator> ag_wgrad_on_gpu(Communicator&, const OpDesc&,
                                                 const OverlapOptions&) {
  refuse("ag_wgrad");
}

std::unique_ptr<MoeOnRanks> make_gpu_moe(Communicator&, const MoeShape&, const MoeOptions&) {
  refuse("moe");
}

}  // namespace tandem
