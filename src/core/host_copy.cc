#include "core/host_copy.h"

namespace tandem {

std::span<float> host_values(const Tensor& values) {
  return {values.as<float>(), size_t(values.elements())};
}

HostCopy::HostCopy(const Exec& exec, const Tensor& values)
    : exec_(exec), device_values_(values), host_(host_tensor(host_values(values))) {
  if (values.device() == Device()) return;
  copy_.resize(size_t(values.elements()));
  host_ = host_tensor(copy_);
  copy(exec, values, host_);
}

void HostCopy::store() const {
  if (!copy_.empty()) copy(exec_, host_, device_values_);
}

}  // namespace tandem
