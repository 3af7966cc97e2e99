#include "engine/data/open_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/config/config_paths.h"
#include "engine/data/blend/blend.h"
#include "engine/data/corpus.h"
#include "engine/data/manifest.h"
#include "engine/data/select_data.h"
#include "engine/data/stream/shard_stream.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/chat_lines.h"
#include "engine/data/text/json_lines.h"
#include "engine/data/tokens/token_files.h"
#include "engine/data/tokens/tokenized_text.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kText = "text";
constexpr const char* kTokens = "tokens";
constexpr const char* kJsonLines = "jsonl";
constexpr const char* kChats = "chat";

/// Files of each of `paths`; `key`: their name in the job file. Collective over `world`.
std::vector<SelectedData> select_all(const std::vector<std::string>& paths, const std::string& key,
                                     const std::string& format, const std::string& text_key,
                                     Communicator* world) {
  std::vector<SelectedData> all;
  std::string error;
  bool is_refused = false;
  SharedWork work(world, "listing the data", 0);
  try {
    for (const std::string& path : paths) {
      all.push_back(select_data({path}, format, text_key));
      work.advance(0);
    }
  } catch (const ConfigError& refused) {
    error = refused.what();
    is_refused = true;
  } catch (const IoError& failed) {
    error = failed.what();
  }
  try {
    work.finish(error);
  } catch (const IoError& failed) {
    if (is_refused) throw ConfigError(failed.what());
    throw;
  }
  for (size_t i = 0; i < paths.size(); ++i) {
    if (all[i].format == all[0].format) continue;
    throw ConfigError(fmt::format("{}: {} holds {}, {} {}: expected one format, or data.format",
                                  key, paths[0], all[0].format, paths[i], all[i].format));
  }
  return all;
}

/// All of `selected` as one.
SelectedData merge(const std::vector<SelectedData>& selected) {
  SelectedData all{selected[0].format, {}, {}};
  std::set<std::string> known;
  for (const SelectedData& one : selected) {
    for (const std::string& file : one.files) {  // token files stay in the order of the entries
      if (known.insert(file).second) all.files.push_back(file);
    }
    all.notes.insert(all.notes.end(), one.notes.begin(), one.notes.end());
  }
  if (all.format != kTokens) std::ranges::sort(all.files);
  return all;
}

/// Settings that all sources of a run are opened with.
struct Opening {
  std::string format;
  int64_t vocab;
  std::shared_ptr<const Tokenizer> tokenizer;  ///< nullptr: bytes
  Communicator* world;
  Manifest known;
  std::optional<StreamOptions> stream;  ///< of a stream of shards
  bool document_mask;
  std::string separator;                    ///< between documents of text
  int32_t separator_token;                  ///< between those of token files; -1: none
  std::string text_key;                     ///< of JSON Lines
  std::shared_ptr<const LineFormat> chats;  ///< nullptr: of another format
};

std::shared_ptr<const Tokenizer> tokenizer_of(const Opening& with) {
  return with.tokenizer ? with.tokenizer : std::make_shared<ByteTokenizer>();
}

std::unique_ptr<TokenSource> open_stream(const Opening& with,
                                         const std::vector<std::string>& files) {
  ShardFormat format{with.format,    with.vocab,           with.tokenizer, with.document_mask,
                     with.separator, with.separator_token, with.text_key};
  format.tokenizer = with.format == kTokens ? nullptr : tokenizer_of(with);
  return std::make_unique<ShardStream>(files, format, *with.stream, with.world, with.known);
}

std::unique_ptr<TokenSource> open_files(const Opening& with, const std::vector<std::string>& files,
                                        double val_fraction) {
  if (with.stream) return open_stream(with, files);
  if (with.format == kText && (with.tokenizer || !with.separator.empty())) {
    return std::make_unique<TokenizedText>(files, val_fraction, tokenizer_of(with), with.world,
                                           with.separator);
  }
  if (with.format == kText) {
    return std::make_unique<Corpus>(files, val_fraction, with.world, with.known);
  }
  if (with.format == kTokens) {
    return std::make_unique<TokenFiles>(files, val_fraction, with.vocab, with.world, with.known,
                                        with.separator_token);
  }
  const auto lines =
      with.chats ? with.chats : std::make_shared<TextLines>(tokenizer_of(with), with.text_key);
  return std::make_unique<JsonLines>(files, val_fraction, lines, with.world);
}

std::unique_ptr<TokenSource> open_source(const Opening& with, const SelectedData& selected,
                                         double val_fraction) {
  auto source = open_files(with, selected.files, val_fraction);
  source->add_notes(selected.notes);
  return source;
}

/// Throws ConfigError for a value of data.document_separator that the format does not have.
void set_separator(const std::string& text, Opening& with) {
  if (text.empty()) return;
  if (with.format == kJsonLines || with.format == kChats) {
    throw ConfigError(fmt::format(
        "data.document_separator is \"{}\": expected none for JSON Lines, which have a document "
        "per line",
        printable(text)));
  }
  if (with.format == kText) {
    with.separator = text;
    return;
  }
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, with.separator_token);
  const bool is_token = parsed.ec == std::errc() && parsed.ptr == end &&
                        with.separator_token >= 0 && with.separator_token < with.vocab;
  if (is_token) return;
  throw ConfigError(
      fmt::format("data.document_separator is \"{}\": expected a token of token files, 0 to {}",
                  printable(text), with.vocab - 1));
}

/// Throws ConfigError for documents of JSON Lines whose bytes would be tokens of a larger
/// vocabulary, unless the job names their format.
void require_vocabulary(const DataConfig& data, int64_t vocab, const std::string& format) {
  const bool is_meant = format != kJsonLines || data.format == kJsonLines;
  if (is_meant || !data.tokenizer.empty() || vocab <= kBos + 1) return;
  throw ConfigError(fmt::format(
      "model.vocab is {}, and JSON Lines are read as bytes without data.tokenizer: expected "
      "data.tokenizer, model.vocab = {}, or data.format = \"{}\" to read bytes",
      vocab, kBos + 1, kJsonLines));
}

/// The tokenizer in `path`, data.tokenizer; nullptr without it.
std::shared_ptr<const TextTokenizer> open_configured_tokenizer(const std::string& path,
                                                               int64_t vocab,
                                                               const std::string& format) {
  if (path.empty()) return nullptr;
  const auto tokenizer = open_tokenizer(path, vocab);
  if (!tokenizer->only_added_beyond() || tokenizer->separator() >= vocab) {
    throw ConfigError(
        fmt::format("model.vocab is {}: expected at least the {} of data.tokenizer {}", vocab,
                    tokenizer->vocab() + tokenizer->num_beyond(), path));
  }
  if (tokenizer->separator() < 0 && format != kTokens) {
    throw ConfigError(fmt::format(
        "data.tokenizer {}: has no token that begins or ends a document: expected one", path));
  }
  return tokenizer;
}

/// nullptr for another format. `tokenizer`: that of data.tokenizer; `seq`: tokens of a sequence.
std::shared_ptr<const LineFormat> open_chats(const DataConfig& data, int64_t seq,
                                             std::shared_ptr<const TextTokenizer> tokenizer) {
  if (data.format != kChats) return nullptr;
  if (!tokenizer) {
    throw ConfigError(
        "data.format is chat: expected data.tokenizer, a model's folder with a chat template");
  }
  if (data.order == "stream") {
    throw ConfigError("data.order is stream: expected shuffle where data.format is chat");
  }
  if (data.packing == "none" || !data.document_mask) {
    throw ConfigError(
        "data.format is chat: expected data.packing = best_fit and data.document_mask = true");
  }
  ChatTemplate form(read_side_files(folder_of_tokenizer(data.tokenizer)),
                    tokenizer->special_tokens());
  return std::make_shared<ChatLines>(std::move(tokenizer), std::move(form), seq + 1);
}

std::optional<StreamOptions> stream_options(const DataConfig& data, const RunConfig& train) {
  if (data.order != "stream") return {};
  const int64_t block = data.shuffle_windows * train.seq;
  const int64_t batch = train.batch * train.seq;
  return StreamOptions{.seed = uint64_t(train.seed),
                       .shuffle_windows = data.shuffle_windows,
                       .retained_tokens = retained_stream_tokens(block, batch),
                       .ahead_tokens = 2 * block};
}

Manifest read_manifest(const std::string& given, const std::string& otherwise) {
  if (!given.empty()) return Manifest::read(given);
  return otherwise.empty() || !path_exists(otherwise) ? Manifest() : Manifest::read(otherwise);
}

/// All of `source` as data to validate on.
HeldOut validation_set(std::unique_ptr<TokenSource> source) {
  HeldOut set;
  set.identity = source->identity();
  if (const auto* text = dynamic_cast<const Corpus*>(source.get())) {
    set.files = text->files();
    set.sizes = text->sizes();
    set.contents = text->contents();
  } else {
    set.stream = std::move(source);
  }
  return set;
}

/// Throws, on every rank, for a source that does not know its documents or cannot read them.
/// `key`: that asks for them.
void require_documents(const TokenSource& source, const std::string& key, Communicator* world) {
  SharedWork work(world, "reading the documents' begins", 0);
  std::string error;
  bool has_documents = true;
  try {
    for (const WeightedSource& component : source.components()) {
      const ShardStream* stream = component.source->stream();
      has_documents = has_documents && (stream ? stream->has_documents()
                                               : !component.source->document_begins().empty());
      work.advance(0);
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  if (has_documents) return;
  throw ConfigError(
      fmt::format("{}: {} have no documents: expected .bin files with an .idx, "
                  "data.document_separator, JSON Lines or text",
                  key, source.describe()));
}

bool has_predictions(const TokenSource& source) {
  const int64_t min = source.start_token() >= 0 ? 1 : 2;
  const auto begins = source.document_begins();
  return std::adjacent_find(begins.begin(), begins.end(), [min](int64_t begin, int64_t end) {
           return end - begin >= min;
         }) != begins.end();
}

/// Reads the documents if a key of `data` asks for them.
void open_documents(const DataConfig& data, Communicator* world, TokenSource& source) {
  const bool is_packed = data.packing != "none";
  if (!is_packed && !data.document_mask) return;
  const std::string key =
      is_packed ? fmt::format("data.packing = {}", data.packing) : "data.document_mask = true";
  require_documents(source, key, world);
  if (data.document_mask && source.held_out().stream) {
    require_documents(*source.held_out().stream, key, world);
  }
  const auto components = source.components();
  const bool is_empty = std::ranges::none_of(components, [](const WeightedSource& component) {
    return component.source->stream() || has_predictions(*component.source);
  });
  if (is_empty) {
    throw ConfigError(fmt::format("{}: {}: no document has two tokens", key, source.describe()));
  }
  if (!is_packed) return;
  std::string begins;
  for (const WeightedSource& component : source.components()) {
    const auto of_component = component.source->document_begins();
    begins += content_hash(std::as_bytes(of_component)) + "\n";
    if (has_predictions(*component.source)) continue;
    throw ConfigError(
        fmt::format("{}: {}: no document has two tokens", key, component.source->describe()));
  }
  source.identify(data.packing + " " + content_hash(begins));
}

}  // namespace

std::vector<std::string> find_data_files(const std::vector<std::string>& paths,
                                         const std::string& format) {
  return merge(select_all(paths, "data.paths", format, DataConfig().text_key, nullptr)).files;
}

void set_chat_keys(DataConfig& data) {
  if (data.format == "auto" && !data.paths.empty()) {
    const std::string path = parse_weighted_path(data.paths[0]).path;
    try {
      if (select_data({path}, "auto", data.text_key).format == kChats) data.format = kChats;
    } catch (const Error&) {  // opening it reports the error
    }
  }
  if (data.format != kChats) return;
  data.packing = "best_fit";
  data.document_mask = true;
}

std::unique_ptr<TokenSource> open_data(const DataConfig& data, int64_t vocab,
                                       const RunConfig& train, Communicator* world,
                                       const std::string& manifest) {
  std::vector<std::string> paths;
  std::vector<double> weights;
  for (const std::string& entry : data.paths) {
    const WeightedPath parsed = parse_weighted_path(entry);
    paths.push_back(parsed.path);
    if (parsed.weight > 0) weights.push_back(parsed.weight);
  }
  const std::vector<SelectedData> selected =
      select_all(paths, "data.paths", data.format, data.text_key, world);
  require_vocabulary(data, vocab, selected[0].format);
  const auto tokenizer = open_configured_tokenizer(data.tokenizer, vocab, selected[0].format);
  Opening with{selected[0].format,
               vocab,
               tokenizer,
               world,
               read_manifest(data.manifest, manifest),
               stream_options(data, train),
               data.document_mask,
               "",
               -1,
               data.text_key,
               open_chats(data, train.seq, tokenizer)};
  set_separator(data.document_separator, with);
  std::unique_ptr<TokenSource> source;
  if (weights.empty()) {
    source = open_source(with, merge(selected), data.val_fraction);
  } else {
    Blend::Sources sources;
    for (const SelectedData& one : selected) {
      sources.push_back(open_source(with, one, data.val_fraction));
      if (with.stream) ++with.stream->seed;
    }
    source = std::make_unique<Blend>(std::move(sources), std::move(weights));
  }
  if (!tokenizer && with.format != kTokens && vocab > kBos + 1) {
    source->add_notes(std::vector{fmt::format(
        "text is read as bytes: {} of the {} tokens of model.vocab are used (data.tokenizer)",
        kBos + 1, vocab)});
  }
  if (data.val_paths.empty()) {
    open_documents(data, world, *source);
    return source;
  }
  const SelectedData held_out =
      merge(select_all(data.val_paths, "data.val_paths", data.format, data.text_key, world));
  if (held_out.format != with.format) {
    throw ConfigError(fmt::format("data.val_paths holds {}, data.paths {}: expected one format",
                                  held_out.format, with.format));
  }
  for (const std::string& note : held_out.notes) {
    source->add_notes(std::vector{"of data.val_paths " + note});
  }
  with.stream = {};
  source->validate_on(validation_set(open_files(with, held_out.files, 0)));
  open_documents(data, world, *source);
  return source;
}

}  // namespace tandem
