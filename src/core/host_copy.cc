#include "core/host_copy.h"

namespace tandem {

HostCopy::HostCopy(const Exec& exec, const Tensor& values)
    : exec_(exec), device_values_(values), values_(values.as<float>(), size_t(values.elements())) {
  if (!exec.on_gpu()) return;
  copy_.resize(values_.size());
  values_ = copy_;
  copy(exec, values, Tensor::of(values_, {values.elements()}));
}

void HostCopy::store() const {
  if (exec_.on_gpu()) copy(exec_, Tensor::of(values_, {device_values_.elements()}), device_values_);
}

}  // namespace tandem
