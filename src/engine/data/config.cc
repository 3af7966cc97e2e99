#include "engine/data/config.h"

#include <fmt/format.h>

#include <tuple>

#include "engine/config/config_paths.h"
#include "engine/config/data_format.h"
#include "engine/config/section.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Range kFormats =
    std::apply([](const auto&... names) { return one_of(names...); }, kDataFormatNames);

constexpr Key<DataConfig> kDataKeys[] = {
    {"paths", &DataConfig::paths, kAny,
     "folders, globs and files, or a blend: [\"0.7 PATH\", \"0.3 PATH\"]"},
    {"format", &DataConfig::format, kFormats,
     "of the files (auto: by their endings and content); of a folder those of this format are "
     "taken"},
    {"text_key", &DataConfig::text_key, kAny,
     "key of JSON Lines that a document's text stands under"},
    {"tokenizer", &DataConfig::tokenizer, kAny,
     "file of a vocabulary, or its folder, that text and JSON Lines are read with (\"\": bytes)"},
    {"val_fraction", &DataConfig::val_fraction, Range(0, 0.9),
     "share kept out of training: files of text and documents of JSON Lines by a hash of their "
     "content, the last documents or tokens of token files"},
    {"val_paths", &DataConfig::val_paths, kAny, "data to validate on instead, as data.paths"},
    {"manifest", &DataConfig::manifest, kAny,
     "what `tandem data index` wrote of the files (\"\": in a resumed run OUT/data.json)"},
    {"document_separator", &DataConfig::document_separator, kAny,
     "between documents in a file: text, or of token files a token's number (\"\": nothing)"},
    {"document_mask", &DataConfig::document_mask, kAny,
     "attention does not cross from one document into another"},
    {"packing", &DataConfig::packing, one_of("none", "best_fit"),
     "sequences of whole documents, best fit first, rather than of the stream that is cut every "
     "train.seq tokens"},
    {"order", &DataConfig::order, one_of("shuffle", "stream"),
     "of samples: shuffled over an epoch, or files in shuffled order, each opened when it is "
     "reached"},
    {"shuffle_windows", &DataConfig::shuffle_windows, Range(1, 1 << 20),
     "consecutive windows of a stream that are shuffled among themselves"},
};

}  // namespace

std::span<const Key<DataConfig>> DataConfig::keys() {
  return kDataKeys;
}

void DataConfig::check() const {
  if (val_fraction > 0 && !val_paths.empty()) {
    throw ConfigError(fmt::format(
        "data.val_fraction is {}: expected 0 where data.val_paths is given", val_fraction));
  }
  // A stream's length and documents are not known before it is read.
  if (order == "stream" && val_fraction > 0) {
    throw ConfigError(fmt::format(
        "data.val_fraction is {}: expected 0 where data.order is stream; data.val_paths names data "
        "to validate on",
        val_fraction));
  }
  if (order == "stream" && packing != "none") {
    throw ConfigError(
        fmt::format("data.packing is {}: expected none where data.order is stream", packing));
  }
  if (paths.empty()) throw ConfigError("data.paths is empty: expected folders, globs or files");
  check_weights(paths, "data.paths");
}

}  // namespace tandem
