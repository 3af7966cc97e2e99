// GEMMs in a build without CUDA, whose ranks are CPUs.
#include "tune/gemm_choices.h"

namespace tandem {

void share_gemm_choices(Communicator&) {}
void agree_on_gemm_choices(Communicator&) {}

}  // namespace tandem
