// Text that comes byte by byte and ends before the first of some strings.
#pragma once

#include <string>
#include <vector>

namespace tandem {

class StopText {
 public:
  /// Throws InvalidArgument for an empty one.
  explicit StopText(std::vector<std::string> stops);

  /// Takes the next byte and returns what of the text is certain by now: what might be the
  /// beginning of a stop is held back.
  std::string add(char next);
  /// The stop that has come, nullptr before. It and what follows it are no part of the text.
  const std::string* stop() const { return stop_; }
  /// What was held back, where no more bytes come.
  std::string rest();

 private:
  std::vector<std::string> stops_;
  std::string held_;
  const std::string* stop_ = nullptr;
};

}  // namespace tandem
