#include "engine/data/open_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/files.h"
#include "core/printable.h"
#include "engine/config/config_paths.h"
#include "engine/data/blend.h"
#include "engine/data/corpus.h"
#include "engine/data/json_lines.h"
#include "engine/data/manifest.h"
#include "engine/data/shard_stream.h"
#include "engine/data/shared_work.h"
#include "engine/data/token_files.h"
#include "engine/data/tokenized_text.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kText = "text";
constexpr const char* kTokens = "tokens";
constexpr const char* kJsonLines = "jsonl";

/// Format of `files`: text if they differ.
std::string format_of_files(const std::vector<std::string>& files) {
  if (files.empty()) return kText;
  if (std::ranges::all_of(files, is_json_lines)) return kJsonLines;
  return std::ranges::all_of(files, is_token_file) ? kTokens : kText;
}

/// Format of the files that `path` names.
std::string format_of(const std::string& path) {
  if (is_token_prefix(path)) return kTokens;
  try {
    return format_of_files(find_files(std::span(&path, 1)).files);
  } catch (const IoError&) {
    return format_of_files({path});  // opening it reports the error
  }
}

/// Format of all `paths`; `key`: their name in the job file.
std::string choose_format(const std::vector<std::string>& paths, const std::string& key) {
  const std::string first = format_of(paths[0]);
  for (const std::string& path : paths) {
    if (const std::string format = format_of(path); format != first) {
      throw ConfigError(fmt::format("{}: {} holds {}, {} {}: expected one format, or data.format",
                                    key, paths[0], first, path, format));
    }
  }
  return first;
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
  std::string separator;    ///< between documents of text
  int32_t separator_token;  ///< between those of token files; -1: none
};

std::shared_ptr<const Tokenizer> tokenizer_of(const Opening& with) {
  return with.tokenizer ? with.tokenizer : std::make_shared<ByteTokenizer>();
}

std::unique_ptr<TokenSource> open_stream(const Opening& with,
                                         const std::vector<std::string>& paths) {
  ShardFormat format{with.format,        with.vocab,     with.tokenizer,
                     with.document_mask, with.separator, with.separator_token};
  format.tokenizer = with.format == kTokens ? nullptr : tokenizer_of(with);
  return std::make_unique<ShardStream>(find_data_files(paths, with.format), format, *with.stream,
                                       with.world, with.known);
}

std::unique_ptr<TokenSource> open_source(const Opening& with, const std::vector<std::string>& paths,
                                         double val_fraction) {
  if (with.stream) return open_stream(with, paths);
  if (with.format == kText && (with.tokenizer || !with.separator.empty())) {
    const std::vector<std::string> files = find_data_files(paths, with.format);
    return std::make_unique<TokenizedText>(files, val_fraction, tokenizer_of(with), with.world,
                                           with.separator);
  }
  if (with.format == kText) {
    return std::make_unique<Corpus>(paths, val_fraction, with.world, with.known);
  }
  const std::vector<std::string> files = find_data_files(paths, with.format);
  if (with.format == kTokens) {
    return std::make_unique<TokenFiles>(files, val_fraction, with.vocab, with.world, with.known,
                                        with.separator_token);
  }
  return std::make_unique<JsonLines>(files, val_fraction, tokenizer_of(with), with.world);
}

/// Throws ConfigError for a value of data.document_separator that the format does not have.
void set_separator(const std::string& text, Opening& with) {
  if (text.empty()) return;
  if (with.format == kJsonLines) {
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

/// That of data.tokenizer, nullptr without it.
std::shared_ptr<const Tokenizer> open_configured_tokenizer(const TrainConfig& config) {
  const std::string& path = config.data.tokenizer;
  if (path.empty()) return nullptr;
  const auto tokenizer = open_tokenizer(path);
  if (tokenizer->vocab() > config.model.vocab) {
    throw ConfigError(
        fmt::format("model.vocab is {}: expected at least the {} of data.tokenizer {}",
                    config.model.vocab, tokenizer->vocab(), path));
  }
  if (tokenizer->separator() < 0) {
    throw ConfigError(fmt::format(
        "data.tokenizer {}: has no token that begins or ends a document: expected one", path));
  }
  return tokenizer;
}

std::optional<StreamOptions> stream_options(const TrainConfig& config) {
  if (config.data.order != "stream") return {};
  const int64_t block = config.data.shuffle_windows * config.train.seq;
  const int64_t batch = config.train.batch * config.train.seq;
  return StreamOptions{.seed = uint64_t(config.train.seed),
                       .shuffle_windows = config.data.shuffle_windows,
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
void open_documents(const TrainConfig& config, Communicator* world, TokenSource& source) {
  const auto& data = config.data;
  const bool is_packed = data.packing != "none";
  if (!is_packed && !data.document_mask) return;
  const std::string key =
      is_packed ? fmt::format("data.packing = {}", data.packing) : "data.document_mask = true";
  require_documents(source, key, world);
  if (data.document_mask && source.held_out().stream) {
    require_documents(*source.held_out().stream, key, world);
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
  if ((format == "auto" ? choose_format(paths, "data.paths") : format) != kTokens) {
    return find_files(paths).files;
  }
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    for (std::string& file : find_token_files(path)) files.push_back(std::move(file));
  }
  return files;
}

std::unique_ptr<TokenSource> open_data(const TrainConfig& config, Communicator* world,
                                       const std::string& manifest) {
  const auto& data = config.data;
  std::vector<std::string> paths;
  std::vector<double> weights;
  for (const std::string& entry : data.paths) {
    const WeightedPath parsed = parse_weighted_path(entry);
    paths.push_back(parsed.path);
    if (parsed.weight > 0) weights.push_back(parsed.weight);
  }
  const bool is_auto = data.format == "auto";
  Opening with{is_auto ? choose_format(paths, "data.paths") : data.format,
               config.model.vocab,
               open_configured_tokenizer(config),
               world,
               read_manifest(data.manifest, manifest),
               stream_options(config),
               data.document_mask,
               "",
               -1};
  set_separator(data.document_separator, with);
  std::unique_ptr<TokenSource> source;
  if (weights.empty()) {
    source = open_source(with, paths, data.val_fraction);
  } else {
    Blend::Sources sources;
    for (const std::string& path : paths) {
      sources.push_back(open_source(with, {path}, data.val_fraction));
      if (with.stream) ++with.stream->seed;
    }
    source = std::make_unique<Blend>(std::move(sources), std::move(weights));
  }
  if (data.val_paths.empty()) {
    open_documents(config, world, *source);
    return source;
  }
  if (is_auto) {
    const std::string found = choose_format(data.val_paths, "data.val_paths");
    if (found != with.format) {
      throw ConfigError(fmt::format("data.val_paths holds {}, data.paths {}: expected one format",
                                    found, with.format));
    }
  }
  with.stream = {};
  source->validate_on(validation_set(open_source(with, data.val_paths, 0)));
  open_documents(config, world, *source);
  return source;
}

}  // namespace tandem
