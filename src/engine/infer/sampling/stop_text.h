// Text received byte by byte, ending before the first stop string.
#pragma once

#include <string>
#include <vector>

namespace tandem {

class StopText {
 public:
  /// Throws InvalidArgument for an empty stop string.
  explicit StopText(std::vector<std::string> stop_strings);

  /// Appends the next byte and returns the text that is final: a possible prefix of a stop string
  /// is held back.
  std::string add(char next);
  /// Stop string found, nullptr before. It and any text after it are excluded.
  const std::string* stop() const { return stop_; }
  /// Held-back text, once no more bytes follow.
  std::string rest();

 private:
  std::vector<std::string> stop_strings_;
  std::string pending_;
  const std::string* stop_ = nullptr;
};

}  // namespace tandem
