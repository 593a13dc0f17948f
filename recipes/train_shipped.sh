#!/bin/bash
# Trains drafters like those that come with the package for smollm2-135m: recipes/train_shipped.sh FOLDER [NAME...]
# recipes/pack_shipped.sh then packs them.
# The data are answers to the prompts of prompts.py and to questions that the target generates. EAGLE-3 is first trained
# on the target's questions alone. FastEagle begins with the shipped EAGLE-3 as its first level, and learns from the
# corpus of suffix. A second run continues where the first one stopped.
# The script has not been run as a whole. The shipped EAGLE-3 was trained twice on 690,000 more tokens of such answers in
# between. It then continued with other prompts (seed 3), whose answers are part of suffix's corpus. Every model card has
# the commands.
set -eu
[ $# -gt 0 ] || { echo "expected a folder: recipes/train_shipped.sh FOLDER [NAME...]" >&2 && exit 2; }
folder=$1 && shift
[ $# -gt 0 ] || set -- eagle3 fasteagle medusa glide draft_model suffix
for name; do # before hours of work
  case $name in
    eagle3 | fasteagle | medusa | glide | draft_model | suffix) ;;
    *) echo "NAME: unknown drafter $name" >&2 && exit 2 ;;
  esac
done
here=$(dirname "$(realpath "$0")")
shipped=$here/../specengine/checkpoints/smollm2-135m
mkdir -p "$folder" && cd "$folder"
if [ ! -f prompts.jsonl ]; then
  python -W ignore "$here/prompts.py" 6000 prompts.part 2
  python "$here/questions.py" 2500 2 >>prompts.part
  shuf --random-source=<(yes) prompts.part >prompts.jsonl
fi

learn() { # OUT DRAFTER OPTIONS...
  local out=$1 drafter=$2 && shift 2
  specengine train --target smollm2-135m --drafter "$drafter" --out "$out" --batch-tokens 256 --rows 1024 \
    --evaluate-steps 400 --save-steps 100 --precision bfloat16 --storage int8 "$@"
}

asked() { # NAME DRAFTER TOKENS OPTIONS...
  local name=$1 drafter=$2 tokens=$3 && shift 3
  learn "$name" "$drafter" --data asked --prompts prompts.jsonl --tokens "$tokens" --epochs 1 --seed 2 "$@"
}

corpus() { # the answers of suffix's corpus: in corpus_data, and again the shards from number 63 on in corpus_rest
  [ ! -d corpus_data ] || return 0
  python -W ignore "$here/prompts.py" 7000 prompts_11.jsonl 11
  python -W ignore "$here/prompts.py" 6000 prompts_3.jsonl 3
  python "$here/corpus_dialogues.py" "$shipped/suffix/corpus.safetensors" corpus_data prompts_11.jsonl prompts_3.jsonl
  mkdir -p corpus_rest
  local shards=(corpus_data/dialogues-*.safetensors) number
  for ((number = 63; number < ${#shards[@]}; number++)); do
    ln -sf "../${shards[number]}" "corpus_rest/$(printf dialogues-%05d.safetensors $((number - 63)))"
  done
}

both() { # NAME DRAFTER
  learn "first_$1" "$2" --data self_asked --tokens 940000 --epochs 2 --learning-rate 1e-3 --seed 0
  asked "$1" "$2" 1200000 --learning-rate 7e-4 --start "first_$1"
}

for name; do
  case $name in
    eagle3) both eagle3 eagle3,levels=5 ;;
    fasteagle)
      corpus
      parts=fasteagle,levels=3,entry=concat,head=own,start=entry,markov=64,cross_entropy=1,feature=0,decay=2
      learn first_fasteagle $parts --data corpus_data --tokens 700000 --batch-tokens 512 --seed 0 \
        --learning-rate 7e-4 --start "$shipped/eagle3"
      learn fasteagle $parts --data corpus_rest --tokens 330000 --batch-tokens 512 --seed 0 \
        --learning-rate 4e-4 --start first_fasteagle --keep-vocabulary
      mkdir -p smaller && cp fasteagle/{README.md,config.json,model.safetensors} smaller
      python "$here/fewer_tokens.py" smaller corpus_data 6656
      ;;
    medusa) asked medusa medusa,heads=4 600000 --learning-rate 1e-3 ;;
    glide) asked glide glide,layers=1 450000 --learning-rate 1e-3 ;;
    suffix) specengine corpus asked --packed --out suffix/corpus.safetensors ;;
    draft_model) asked draft_model draft-model,layers=4 300000 --learning-rate 1e-3 ;;
  esac
done
