#include "engine/data/tokens/token_source.h"

#include "core/system/files.h"

namespace tandem {

void TokenSource::identify(const std::string& samples) {
  fingerprint_ = content_hash(fingerprint_ + " " + samples);
}

}  // namespace tandem
