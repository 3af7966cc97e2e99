#include "cli/evaluation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "engine/data/scored_windows.h"
#include "engine/data/text/chat_lines.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

std::shared_ptr<const LineFormat> open_lines(const EvaluateOptions& options,
                                             const EvaluationInputs& inputs) {
  auto tokenizer = std::dynamic_pointer_cast<const TextTokenizer>(options.tokenizer);
  if (!tokenizer) {
    throw ConfigError(inputs.directory + ": no tokenizer: expected one to score chats");
  }
  ChatTemplate form(inputs.side, tokenizer->special_tokens());
  return std::make_shared<ChatLines>(std::move(tokenizer), std::move(form), options.seq + 1);
}

/// `tokens` of the score are those of answers.
FileScore score(Evaluator& evaluator, const PackedWindows& windows) {
  FileScore total;
  for (int64_t first = 0; first < windows.count(); first += evaluator.options().batch) {
    const int64_t end = std::min(windows.count(), first + evaluator.options().batch);
    std::vector<ScoredWindow> batch;
    for (int64_t i = first; i < end; ++i) batch.push_back(windows.read(i));
    const FileScore scored = evaluator.score(batch);
    total.nats += scored.nats;
    total.tokens += scored.bytes;
  }
  return total;
}

}  // namespace

void evaluate_chats(Communicator& comm, const EvaluateOptions& options,
                    const EvaluationInputs& inputs, const ResultOutput& output) {
  Evaluator evaluator(comm, inputs.config, options);
  const int64_t seq = evaluator.options().seq;
  const auto chats = std::make_shared<const JsonLines>(
      inputs.files, 0, open_lines(evaluator.options(), inputs), &comm);
  inputs.load_into(comm, evaluator.model());
  const FileScore total = score(evaluator, PackedWindows(chats, seq, 0));
  const double nats = total.nats / double(total.tokens);
  if (!std::isfinite(nats)) {
    throw InvalidArgument(fmt::format(
        "{} nats per token of answers: expected a finite number (the model's values leave the "
        "range of --dtype)",
        nats));
  }
  if (comm.rank() != 0) return;
  const size_t num_chats = chats->document_begins().size() - 1;
  if (output.shows_text()) {
    fmt::print("{:.6f} nats per token, perplexity {:.4f}, over {} tokens of answers in {} chats\n",
               nats, total.perplexity(), total.tokens, num_chats);
  }
  const nlohmann::ordered_json root{{"nats_per_token", nats}, {"nats", total.nats},
                                    {"tokens", total.tokens}, {"perplexity", total.perplexity()},
                                    {"chats", num_chats},     {"files", inputs.files}};
  output.write_json(dump_json(root, 1) + "\n");
}

}  // namespace tandem::cli
