#include "overlap/registry.h"

#include <algorithm>

#include "overlap/ag_gemm/operator.h"
#include "overlap/ag_wgrad/operator.h"
#include "overlap/gemm_ar/operator.h"
#include "overlap/gemm_rs/operator.h"

namespace tandem {

std::vector<const OperatorRow*>& operators() {
  static std::vector<const OperatorRow*> all{&kAgGemmRow, &kGemmRsRow, &kGemmArRow, &kAgWgradRow};
  return all;
}

const OperatorRow* find_operator(std::string_view name) {
  const auto found = std::ranges::find(operators(), name, &OperatorRow::name);
  return found == operators().end() ? nullptr : *found;
}

}  // namespace tandem
