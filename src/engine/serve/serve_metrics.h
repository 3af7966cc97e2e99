// Numbers of a server of texts, in the text format of Prometheus.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "engine/serve/serve_loop.h"

namespace tandem {

class ServeMetrics {
 public:
  void begin(int64_t prompt_tokens);
  void add_token() { ++tokens_; }
  /// `waited_s`: since its request began.
  void add_first_token(double waited_s);
  /// End of a request: all its texts are finished, one could not be, or the client has left.
  enum class End : uint8_t { done, failed, left };
  void end(End how) { ++ended_[size_t(how)]; }
  void refuse() { ++refused_; }
  std::string text(const ServeLoop::Stats& loop) const;

 private:
  static constexpr double kBuckets[] = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10};

  int64_t begun_ = 0, refused_ = 0, prompt_tokens_ = 0, tokens_ = 0;
  std::array<int64_t, 3> ended_ = {};                          // by End
  std::array<int64_t, std::size(kBuckets)> first_token_ = {};  // counts up to each bucket
  int64_t num_first_ = 0;
  double first_token_s_ = 0;
};

}  // namespace tandem
