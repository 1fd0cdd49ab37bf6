// llama.cpp writes its log to stderr unless told otherwise. The bridge keeps it silent and remembers the latest complaints, so
// that an exception can say why llama.cpp refused.
#pragma once

#include <string>

namespace pyggtrain {

// Installs the log handler and starts llama.cpp's backends; called once when the module is imported.
void llama_start();

// Forgets what was logged so far on any thread.
void llama_log_clear();

// Warnings and errors since the last clear, one per line; "no reason given" if there were none.
std::string llama_log_complaints();

} // namespace pyggtrain
