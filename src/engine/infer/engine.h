// Generation of many sequences at once on a tensor-parallel model, by continuous batching (Orca,
// OSDI 2022): each step runs one row for every sequence that is being written, and chunks of new
// prompts in the rows that are left. Keys and values are in pages; if they run out, the newest
// sequence gives its pages back and is computed again later. If all layers have a sliding window,
// CPU ranks give back the pages that it has left, so that a sequence of any length takes pages for
// its window only.
//
// A request's tokens do not depend on the other requests, bit for bit (see Decoder; on GPUs with
// EngineOptions::batch_invariant), nor on when it was submitted, nor on the number of rows or
// pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/infer/cache/page_pool.h"
#include "engine/infer/cache/prefix_tree.h"
#include "engine/infer/continuation.h"
#include "engine/infer/decoder.h"
#include "engine/infer/rank_model.h"
#include "engine/infer/request.h"

namespace tandem {

struct EngineOptions {
  DType dtype = DType::f32;
  int64_t capacity = 0;    ///< max tokens of a prompt and its continuation; 0: config.max_seq
  int64_t sequences = 16;  ///< max sequences that are written at once
  int64_t rows = 64;       ///< max rows of a step, at least `sequences`
  int64_t mixed_rows = 0;  ///< of a step in which sequences are written: fewer delay their tokens
                           ///< less, but it has one at least for each sequence; 0: `rows`
  int64_t pages = 0;  ///< pages of the cache; 0: for `sequences` sequences of `capacity` tokens,
                      ///< or their windows
  /// Texts with the same first tokens share their pages (cache/prefix_tree.h), unless all layers
  /// have windows or a lossy wire format of experts makes a text depend on others.
  bool share_prefixes = true;
  OverlapOptions overlap = {};  ///< of the experts, and of steps of about `rows` sharded rows
  Strategy prefill = Strategy::serial;  ///< of steps that have prompts, as choose_rows has it
  CodecPolicy codec = {};
  /// A text's tokens are the same, bit for bit, whatever else is written: in any case on CPU ranks;
  /// on a GPU as RowsOptions has it, with prompts and tokens in steps of their own, which costs
  /// speed. Unsupported where that cannot be.
  bool batch_invariant = false;
  /// Launches a step that only continues texts before the tokens of the step before are known, so
  /// that a GPU does not wait for the host; by default on GPUs. A text that ends meanwhile has had
  /// one row too many. Tokens are the same.
  std::optional<bool> runs_ahead = {};
  /// Format of the weights of GEMMs (gemm/coded_weight.h), other values in `dtype`; on GPUs that is
  /// bf16, without experts. None: as `dtype`.
  std::optional<WeightFormat> weights = {};
  const TextTokenizer* tokenizer = nullptr;  ///< must outlive the engine; nullptr: bytes
};

/// Sets the rows of steps for `prompt_rows` rows of prompts. On GPUs sequences take some of these,
/// so that full steps have whole tiles, and large steps overlap; CPU ranks have rows for all
/// sequences, too, too few to overlap.
void set_step_rows(EngineOptions& options, int64_t prompt_rows, bool on_gpus);

enum class Finish : uint8_t { end_token, stop_string, max_tokens, failed };
/// "end of text", "stop", "max-tokens" or "failed".
const char* name_of(Finish finish);

/// One token of a request.
struct TokenEvent {
  int64_t request;
  int32_t token;
  float log_prob;                ///< of the token, by the logits before temperature and rules
  std::string text;              ///< that is final with this token
  std::optional<Finish> finish;  ///< failed: there is no token, and `error` says why
  std::string stop = {};         ///< string that ended the text
  std::vector<Sampled> alternatives = {};  ///< likeliest tokens in its place, likeliest first
  std::string error = {};
  /// First tokens of the prompt that were dropped, and then those that were in the cache; both with
  /// the first event.
  int64_t dropped = 0, shared = 0;
  /// Scores of the prompt's tokens from the second on, with the first event, if asked for.
  std::vector<TokenScore> prompt = {};
};

class Engine {
 public:
  /// All ranks make the same calls in the same order; the construction and `step` are collective.
  /// Throws InvalidArgument naming an option that is out of range.
  Engine(Communicator& tp, const ModelConfig& config, const EngineOptions& options);

  /// Sets all weights, as RankModel::set_weights. Throws InvalidArgument while a request is
  /// unfinished.
  void set_weights(const SetParameter& set);
  /// Bytes of this rank's weights.
  size_t weight_bytes() const { return model_.weight_bytes(); }

  /// Random weights, as a new model's.
  void initialize(uint64_t seed);

  /// Number of the request, ascending from 0. A sequence ends early if it has `capacity` tokens,
  /// unless its context rolls. Throws InvalidArgument if the request is invalid, or its prompt has
  /// `capacity` tokens or more, or all pages are too few for it.
  int64_t submit(Request request);
  /// Drops a request, which then has no further event. Whether it was unfinished: otherwise nothing
  /// is done.
  bool cancel(int64_t request);
  /// Runs some rows of the requests; returns the tokens written, at most one for each. A request
  /// whose logits are not finite fails, and the others continue.
  std::vector<TokenEvent> step();
  /// Whether all requests are finished.
  bool is_idle() const { return running_.empty() && waiting_.empty(); }

  struct Stats {
    int64_t steps = 0, rows = 0;
    int64_t preempted = 0;      ///< sequences that gave their pages back
    int64_t shared_tokens = 0;  ///< of prompts, that were in the cache
    int64_t ahead = 0;          ///< steps launched before the tokens of the step before were known
    int64_t rolled = 0;         ///< times that a context was full and its first half dropped
    int64_t logit_bytes = 0;    ///< sent to each other rank to choose and score tokens
  };
  const Stats& stats() const { return stats_; }
  /// Max tokens of a sequence's context.
  int64_t capacity() const { return model_.cache.max_tokens(); }
  /// Form of large steps.
  const RowsForm& form() const { return decoder_.form(); }
  int64_t num_pages() const { return pool_.size(); }
  /// Pages that no text uses, some of which hold what later ones may share.
  int64_t free_pages() const { return pool_.free() + prefixes_.unused(); }

 private:
  /// Options with their defaults.
  struct Resolved {
    EngineOptions options;
  };
  Engine(Communicator& tp, const ModelConfig& config, const Resolved& resolved);

  struct Sequence {
    Sequence(int64_t id, Request given, const TextTokenizer* tokenizer);

    int64_t id;
    Request request;
    Continuation continuation;
    std::vector<int32_t> tokens;     ///< the prompt and the continuation
    int64_t begin = 0;               ///< first token of the context, at position 0
    int64_t cached = 0;              ///< tokens of the context with keys and values
    int64_t chunked;                 ///< of its tokens, that are in chunks; the others in rows
    std::vector<TokenScore> scores;  ///< of the prompt's tokens from the second on
    std::vector<int32_t> pages;      ///< of the context's tokens 0, kPageTokens, ...
    size_t returned = 0;             ///< first pages, which the window has left
    size_t shared = 0;               ///< first pages, which are those of the path to `prefix`
    PrefixTree::Node* prefix = nullptr;
    int64_t found = 0;  ///< tokens of the prompt that were in the cache, until the first event
    bool was_admitted = false;

    std::span<const int32_t> context() const { return std::span(tokens).subspan(size_t(begin)); }
    int64_t length() const { return int64_t(tokens.size()) - begin; }
    int64_t left() const { return length() - cached; }
    /// The last token of a prompt is in a chunk, however the prompt is divided.
    bool has_single_row() const { return cached >= chunked; }
    /// Max tokens of the context; the last token is not read.
    int64_t max_cached(int64_t capacity) const {
      const int64_t written = std::min(capacity, request.max_tokens);
      return std::min(capacity, int64_t(request.prompt.size()) + written - 1);
    }
    uint64_t written() const { return tokens.size() - request.prompt.size(); }
    /// Rows of the context that are launched, whose token is not known yet.
    int64_t unknown() const { return std::max<int64_t>(0, cached - length()); }
    /// Whether there is room for a token after the next one, unless that ends the text.
    bool continues(int64_t capacity) const {
      return int64_t(written()) + 1 < request.max_tokens && length() < capacity;
    }
  };
  using Sequences = std::deque<std::unique_ptr<Sequence>>;

  /// Rows of a prompt, [row, row + count) of a step, whose logits score the tokens after them.
  struct ScoredRows {
    Sequence* sequence;
    int64_t row, token, count;
  };
  struct Step {
    StepRows rows;
    std::vector<Sequence*> chosen;  ///< sequences of rows.chosen; nullptr: ended meanwhile
    std::vector<ScoredRows> scored;
    int32_t num_sequences = 0;  ///< of rows
  };

  /// Launches the planned step.
  void launch();
  /// Whether the step after `step`, which is launched, can be planned without its tokens.
  bool may_run_ahead(const Step& step) const;
  void plan_ahead(const Step& step);
  /// Events of a step by its tokens.
  std::vector<TokenEvent> choose_all(const Step& step, std::span<const Sampled> sampled);
  /// Drops a launched step whose texts have all ended.
  void drop_unread_step();
  /// Takes a sequence that ends from the launched step.
  void remove_from_launched(const Sequence& sequence);
  /// Max pages that a sequence has at once.
  int64_t max_pages(const Sequence& sequence) const;
  void return_pages_before_windows();
  /// Gives a sequence that begins the pages of its first tokens, except the last one.
  void share_prefix(Sequence& sequence);
  /// Offers the full pages of the step's sequences to later ones.
  void offer_pages();
  void plan();
  void plan_tokens();
  void plan_chunks();
  void admit();
  bool plan_chunk(Sequence& sequence);
  /// Takes pages for tokens [0, end) of `sequence`; false if too few are free.
  bool take_pages(Sequence& sequence, int64_t end);
  bool preempt_after(const Sequence& sequence);
  void release(Sequence& sequence);
  void add_rows(Sequence& sequence, int64_t count, bool is_chunk);
  /// Plans the next row of a sequence, whose token is sampled after chosen row `chosen` of the step
  /// before.
  void add_unknown_row(Sequence& sequence, int32_t chosen);
  /// Adds a sequence's line to the page table.
  void add_pages(const Sequence& sequence);
  /// Samples a token after the sequence's last planned row.
  void choose_last_row(Sequence& sequence);
  /// Scores the tokens of prompts after those rows of the last step.
  void score_prompts(std::span<const ScoredRows> all);
  /// Moves the scores of a whole prompt to its first event.
  void add_scores(Sequence& sequence, TokenEvent& event);
  /// Ends a sequence whose logits after `token` are not finite.
  void fail(Sequence& sequence, int64_t token, TokenEvent& event);
  TokenEvent choose(Sequence& sequence, size_t chosen, const Sampled& sampled);
  TokenEvent write(Sequence& sequence, const Sampled& sampled);
  /// Makes room for the next token in a full context.
  void roll(Sequence& sequence);

  RankModel model_;
  const TextTokenizer* tokenizer_;
  int64_t max_sequences_, max_rows_, mixed_rows_;
  int64_t step_rows_ = 0;       // max of the step that is being planned
  bool was_of_tokens_ = false;  // the last step
  int64_t window_;              // tokens whose pages a sequence needs to continue; 0: all
  PagePool pool_;
  bool shares_;
  PrefixTree prefixes_;
  Decoder decoder_;
  int64_t next_id_ = 0;
  Sequences waiting_, running_;  // both in the order of their ids, running ones first
  bool runs_ahead_;
  Step planned_;
  std::optional<Step> launched_;  // whose tokens are not collected
  Stats stats_;
};

}  // namespace tandem
