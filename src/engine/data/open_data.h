// Training data that a job file names.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/data/config.h"
#include "engine/data/tokens/token_source.h"
#include "engine/train/config.h"
#include "tandem/communicator.h"

namespace tandem {

/// Opens data.paths, and data.val_paths for validation, in the format data.format or, if that is
/// "auto", in that of their names and content (select_data.h). Chats are read with the template
/// next to data.tokenizer. Weighted entries of
/// data.paths are a Blend. Throws IoError for a file that cannot be read or trusted, on every rank,
/// and ConfigError for formats that do not go together, and for JSON Lines without data.tokenizer
/// that only data.format = "auto" takes for bytes of a larger model.vocab.
/// Reads the begins of documents if data.document_mask or data.packing asks for them; throws
/// ConfigError, on every rank, for a source that does not know them.
/// `vocab`: tokens of the model; `train`: its length of a sequence, batch and seed decide how a
/// stream is read. Collective over `world` unless it is nullptr.
/// `manifest`: path of one to use if data.manifest is empty; none if it does not exist.
std::unique_ptr<TokenSource> open_data(const DataConfig& data, int64_t vocab,
                                       const RunConfig& train, Communicator* world = nullptr,
                                       const std::string& manifest = "");
/// Sets the format of chats where it is "auto", and for chats the keys that they are packed by,
/// with document masks.
void set_chat_keys(DataConfig& data);
/// Files of `paths` that `format` selects (select_data.h).
std::vector<std::string> find_data_files(const std::vector<std::string>& paths,
                                         const std::string& format);

}  // namespace tandem
