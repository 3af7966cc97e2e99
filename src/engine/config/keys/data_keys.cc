#include "engine/config/keys/data_keys.h"

#include "engine/config/config_slot.h"
#include "engine/config/data_format.h"

namespace tandem {

std::vector<ConfigKey> data_keys() {
  return {
      {"data.paths",
       TANDEM_SLOT(data.paths),
       0,
       0,
       {},
       "folders, globs and files, or a blend: [\"0.7 PATH\", \"0.3 PATH\"]"},
      {"data.format", TANDEM_SLOT(data.format), 0, 0, data_format_names(),
       "of the files (auto: by their endings and content); of a folder those of this format are "
       "taken"},
      {"data.text_key",
       TANDEM_SLOT(data.text_key),
       0,
       0,
       {},
       "key of JSON Lines that a document's text stands under"},
      {"data.tokenizer",
       TANDEM_SLOT(data.tokenizer),
       0,
       0,
       {},
       "file of a vocabulary, or its folder, that text and JSON Lines are read with (\"\": bytes)"},
      {"data.val_fraction",
       TANDEM_SLOT(data.val_fraction),
       0,
       0.9,
       {},
       "share kept out of training: files of text and documents of JSON Lines by a hash of their "
       "content, the last documents or tokens of token files"},
      {"data.val_paths",
       TANDEM_SLOT(data.val_paths),
       0,
       0,
       {},
       "data to validate on instead, as data.paths"},
      {"data.manifest",
       TANDEM_SLOT(data.manifest),
       0,
       0,
       {},
       "what `tandem data index` wrote of the files (\"\": in a resumed run OUT/data.json)"},
      {"data.document_separator",
       TANDEM_SLOT(data.document_separator),
       0,
       0,
       {},
       "between documents in a file: text, or of token files a token's number (\"\": "
       "nothing)"},
      {"data.document_mask",
       TANDEM_SLOT(data.document_mask),
       0,
       0,
       {},
       "attention does not cross from one document into another"},
      {"data.packing",
       TANDEM_SLOT(data.packing),
       0,
       0,
       {"none", "best_fit"},
       "sequences of whole documents, best fit first, rather than of the stream that is cut every "
       "train.seq tokens"},
      {"data.order",
       TANDEM_SLOT(data.order),
       0,
       0,
       {"shuffle", "stream"},
       "of samples: shuffled over an epoch, or files in shuffled order, each opened when it is "
       "reached"},
      {"data.shuffle_windows",
       TANDEM_SLOT(data.shuffle_windows),
       1,
       1 << 20,
       {},
       "consecutive windows of a stream that are shuffled among themselves"},
  };
}

}  // namespace tandem
