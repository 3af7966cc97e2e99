#include "engine/infer/stop_text.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "tandem/error.h"

namespace tandem {

StopText::StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty()) throw InvalidArgument("stop '': expected at least one byte");
  }
}

std::string StopText::add(char next) {
  if (stop_) return "";
  held_ += next;
  size_t kept = 0;  // bytes at the end that may become a stop string
  for (const std::string& stop : stops_) {
    if (held_.ends_with(stop) && (!stop_ || stop.size() > stop_->size())) stop_ = &stop;
    for (size_t n = std::min(held_.size(), stop.size() - 1); n > kept; --n) {
      if (held_.ends_with(std::string_view(stop).substr(0, n))) kept = n;
    }
  }
  if (stop_) kept = stop_->size();
  std::string text = held_.substr(0, held_.size() - kept);
  held_.erase(0, text.size());
  if (stop_) held_.clear();
  return text;
}

std::string StopText::rest() {
  return std::exchange(held_, {});
}

}  // namespace tandem
