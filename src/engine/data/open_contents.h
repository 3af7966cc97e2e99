// Opening of many data files at once, by all ranks.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/data/data_file.h"
#include "tandem/communicator.h"

namespace tandem {

using DataFiles = std::vector<std::shared_ptr<DataFile>>;

/// The files, with their samples read. Compressed ones are unpacked: processes that see the same
/// files divide that work and share the result. Throws IoError, on every rank. Collective over
/// `world` unless it is nullptr.
DataFiles open_contents(std::span<const std::string> paths, Communicator* world);
/// As above, but nullptr for files that are not compressed.
DataFiles open_compressed(std::span<const std::string> paths, Communicator* world);

}  // namespace tandem
