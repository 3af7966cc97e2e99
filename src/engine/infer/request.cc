#include "engine/infer/request.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/infer/rank_model.h"
#include "engine/infer/sampling/invalid_field.h"
#include "engine/infer/sampling/stop_text.h"
#include "tandem/error.h"

namespace tandem {

void check(const Request& request, const ModelConfig& config, int64_t capacity) {
  check(request.sampling);
  check(request.rules, config.vocab);
  if (request.alternatives < 0 || request.alternatives > kMaxAlternatives ||
      request.prompt_alternatives > kMaxAlternatives) {
    throw InvalidArgument(fmt::format("{} other tokens' log-probabilities: expected 0 to {}",
                                      std::max(request.alternatives, request.prompt_alternatives),
                                      kMaxAlternatives));
  }
  if (request.rolls && request.prompt_alternatives >= 0) {
    throw InvalidArgument("scores of a prompt whose beginning may be dropped: expected none");
  }
  check_tokens(config, request.prompt);
  const StopText checked(request.stops);
  if (request.max_tokens < 1) {
    throw InvalidField("max_tokens", request.max_tokens, "at least 1");
  }
  if (!request.rolls && int64_t(request.prompt.size()) >= capacity) {
    throw InvalidArgument(fmt::format("prompt of {} tokens: expected fewer than the capacity {}",
                                      request.prompt.size(), capacity));
  }
}

}  // namespace tandem
