#include "engine/infer/sampling/stop_text.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "tandem/error.h"

namespace tandem {

StopText::StopText(std::vector<std::string> stop_strings) : stop_strings_(std::move(stop_strings)) {
  for (const std::string& stop : stop_strings_) {
    if (stop.empty()) throw InvalidField("stop", "''", "at least one byte");
  }
}

std::string StopText::add(char next) {
  if (stop_) return "";
  pending_ += next;
  size_t num_pending = 0;  // bytes at the end that may become a stop string
  for (const std::string& stop : stop_strings_) {
    if (pending_.ends_with(stop) && (!stop_ || stop.size() > stop_->size())) stop_ = &stop;
    for (size_t n = std::min(pending_.size(), stop.size() - 1); n > num_pending; --n) {
      if (pending_.ends_with(std::string_view(stop).substr(0, n))) num_pending = n;
    }
  }
  if (stop_) num_pending = stop_->size();
  std::string text = pending_.substr(0, pending_.size() - num_pending);
  pending_.erase(0, text.size());
  if (stop_) pending_.clear();
  return text;
}

std::string StopText::rest() {
  return std::exchange(pending_, {});
}

}  // namespace tandem
